"""Takes an editable install of jaxlowbit off the import path, so that the files Bazel laid out are the ones tested."""

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
