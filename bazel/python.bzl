"""The Python environment that the library is built for and tested with: .venv of this folder (`make venv`)."""

_HEADERS = "from importlib.util import find_spec; print(find_spec('jaxlib').submodule_search_locations[0])"

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")

# The XLA FFI headers of the environment's jaxlib.
cc_library(
    name = "xla_ffi",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)

exports_files(["python.sh"])
"""

def _python_environment_impl(repository_ctx):
    root = repository_ctx.path(Label("//:pyproject.toml")).dirname
    python = root.get_child(".venv").get_child("bin").get_child("python")
    if not python.exists:
        fail("%s does not exist: run `make venv` first" % python)
    found = repository_ctx.execute([python, "-c", _HEADERS])
    if found.return_code != 0:
        fail("%s has no jaxlib: run `make venv`\n%s" % (python, found.stderr))
    repository_ctx.symlink(repository_ctx.path(found.stdout.strip()).get_child("include"), "include")

    # A script, not a link: a linked interpreter would not find its environment.
    repository_ctx.file("python.sh", "#!/bin/sh\nexec '%s' \"$@\"\n" % python, executable = True)
    repository_ctx.file("BUILD", _BUILD)

python_environment = repository_rule(
    implementation = _python_environment_impl,
    doc = "Headers of the jaxlib in .venv as //:xla_ffi, and its interpreter as //:python.sh.",
    configure = True,
    local = True,
)
