"""The policy: an immutable value, how it is read and checked.

Reads nothing but files and the environment, knows no network and no clock. A policy that `load` returns is
complete: every default is filled in, every name resolves, every number is possible. Whatever is wrong with a file
is reported all at once, each problem with file, line, path, what is wrong and what would be right.
"""
