"""The policy: an immutable value, how it is read and checked.

Reads nothing but a file, the files that it names and the environment it is given; knows no network and no clock. A
policy that `load` returns is complete: every default is filled in, every name resolves, every number is possible.
Whatever is wrong with a file is reported all at once, each problem with file, line, path, what is wrong and what would
be right; no message shows what came out of the environment or out of a file of secrets.

    source   text -> nodes with lines: YAML's events, `${NAME}`, anchors, merge keys, bounds
    files    what is read from disk, and which files that was
    include  one tree of several files
    reader   what a reader is: node -> value, and what it says of itself
    schema   readers, and how they combine (`section`, `items`, `mapping`, `either`, `reference`)
    read     the tables, one a section, and `load`, `parse`, `implicit`; `backends` and `routes` are the large ones
    spec     the values, their defaults and the reasons for them
    problem  what is wrong, where, and what would be right
    explain, json_schema   two more readings of the tables: values in effect with their lines, and a schema for editors

Text is walked once, top down. A reader that fails raises; whoever combines readers notes it and reads on.
"""

from policies.problem import PolicyError, Problem
from policies.read import implicit, load, parse
from policies.spec import Policy, Secret

__all__ = ["Policy", "PolicyError", "Problem", "Secret", "implicit", "load", "parse"]
