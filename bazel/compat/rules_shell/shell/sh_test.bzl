"""Bazel's built-in sh_test, under the name of rules_shell."""

sh_test = native.sh_test
