import pytest

from policies.files import Files
from policies.problem import PolicyError, Problem
from policies.source import Items, Keys, Leaf, Node, interpolate, resolve, tree


def read(text: str, **environ: str) -> Node:
    root, problems = tree(text, "p.yaml", environ, Files())
    assert not problems
    return root


def plain(node: Node) -> object:
    """A tree without its lines."""
    match node:
        case Leaf():
            return node.value
        case Items():
            return [plain(child) for child in node.children]
        case Keys():
            return {key: plain(entry.node) for key, entry in node.entries.items()}
    return "broken"


def told(text: str, **environ: str) -> list[str]:
    try:
        _, problems = tree(text, "p.yaml", environ, Files())
    except PolicyError as error:
        problems = list(error.problems)
    return [str(problem) for problem in problems]


def test_every_node_knows_its_line_and_column() -> None:
    root = read("a:\n  - b: 1\n    c:\n      d\n")
    assert isinstance(root, Keys)
    items = root.entries["a"].node
    assert isinstance(items, Items)
    inner = items.children[0]
    assert isinstance(inner, Keys)
    leaf = inner.entries["c"].node
    assert (root.entries["a"].line, inner.line, inner.column) == (1, 2, 5)
    assert (inner.entries["c"].line, leaf.line, leaf.column) == (3, 4, 7)


def test_plain_scalars_follow_yaml_1_2() -> None:
    words = {
        "": None, "~": None, "null": None, "true": True, "False": False, "12": 12, "-3": -3, "0x10": 16, "0o17": 15,
        "1.5": 1.5, "-.5": -0.5, "1e3": 1000.0, "off": "off", "yes": "yes", "1_000": "1_000", "012": 12, "1s": "1s",
        "9" * 30: 1e30, "2024-01-01": "2024-01-01",
    }  # fmt: skip
    assert {word: resolve(word) for word in words} == words
    assert plain(read("[1, '1', \"true\", 'null']")) == [1, "1", "true", "null"]


def test_variables_are_replaced_before_a_scalar_gets_its_type() -> None:
    assert plain(read("- ${A}\n- '${A}'\n- ${B:-0.5}\n- x${A}y\n- ${E:-d}\n- ${E}\n- ${T}", A="7", E="", T="true")) == [
        7, 7, 0.5, "x7y", "d", "", True,
    ]  # fmt: skip
    assert interpolate("$${A} $A $$ ${A}", {"A": "1"}, str) == ("${A} $A $$ 1", True, False)
    assert interpolate("$${A}", {}, str) == ("${A}", False, False)
    assert plain(read("${A}: 1")) == {"${A}": 1}


def test_a_variables_value_is_not_interpolated_again_and_not_in_the_repr() -> None:
    node = read("${A}", A="${B}")
    assert plain(node) == "${B}"
    assert "${B}" not in repr(node)


UNNAMED = "'${' is not followed by a name and '}'; write ${NAME}, ${NAME:-default}, or $${ for a literal '${'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: ${A}", "p.yaml:1: a: the environment has no A; set it, or write ${A:-default}"),
        (
            "a:\n- ${1}",
            f"p.yaml:2: a[0]: {UNNAMED}",
        ),
        (
            "a: '${A'",
            f"p.yaml:1: a: {UNNAMED}",
        ),
        ("a: 1\nb: 2\na: 3", "p.yaml:3: a: duplicate key, first on line 1; keep one of them"),
        ("<<: {}\n<<: {}", "p.yaml:2: <<: duplicate key, first on line 1; keep one of them"),
        ("<<: 1", "p.yaml:1: <<: '<<' merges mappings only; write <<: *anchor or <<: [*one, *other]"),
        (
            "a: !!python/name:os.system 1",
            "p.yaml:1: a: the tag '!!python/name:os.system' is not read; write a plain value",
        ),
        ("x: &triton 1\na: *trton", "p.yaml:2: a: no anchor '&trton' above; did you mean 'triton'?"),
        ("a: *b", "p.yaml:1: a: no anchor '&b' above; there are none"),
        ("a: &a [*a]", "p.yaml:1: a[0]: the alias '*a' stands inside of what it names"),
        ("? [a]\n: 1", "p.yaml:1: a mapping or a list stands where a key should; a key is plain text"),
        ("a: &k b\n*k : 1", "p.yaml:2: an alias stands where a key should; a key is plain text"),
        ("a\n---\nb", "p.yaml:2: a second document begins here; a policy is one document"),
        (
            "a: {b: ${A}}",
            "p.yaml:1: not YAML: while parsing a flow mapping,"
            " expected ',' or '}', but got '{'; within {} and [] write '${NAME}' in quotes",
        ),
        ("a: [1", "p.yaml:1: not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"),
        ("a: 1\nb: c: d", "p.yaml:2: not YAML: mapping values are not allowed here"),
        (
            "a: 1\n\tb: 2",
            "p.yaml:2: not YAML: while scanning for the next token, found character '\\t' that cannot start any token",
        ),
        ("a: 1\nb: \x01", "p.yaml:2: not YAML: the character U+0001 is not allowed"),
        ('a: "\\UFFFFFFFF"', "p.yaml: not YAML: Python int too large to convert to C int"),
        ("[" * 40, "p.yaml:1: nested deeper than 32 levels"),
        ("- " * 40, "p.yaml:1: nested deeper than 32 levels"),
        ("# " + "x" * 2**22, "p.yaml: larger than 4 MiB; is this the right file?"),
    ],
)
def test_what_no_tree_is_made_of(text: str, message: str) -> None:
    assert told(text) == [message]


def test_aliases_and_merge_keys() -> None:
    text = """\
x: &x {a: 1, b: 1}
y: &y {b: 2, c: 2}
one: {<<: *x, b: 9}
two: {<<: [*x, *y], d: 4}
three: {"<<": *x}
four: {<<: {<<: *y, c: 0}}
"""
    assert plain(read(text)) == {
        "x": {"a": 1, "b": 1},
        "y": {"b": 2, "c": 2},
        "one": {"a": 1, "b": 9},
        "two": {"a": 1, "b": 1, "c": 2, "d": 4},
        "three": {"<<": {"a": 1, "b": 1}},
        "four": {"b": 2, "c": 0},
    }


def test_a_merged_key_has_the_line_where_it_is_written() -> None:
    root = read("x: &x\n  a: 1\ny:\n  <<: *x\n")
    assert isinstance(root, Keys)
    merged = root.entries["y"].node
    assert isinstance(merged, Keys)
    assert merged.entries["a"].line == 2


def test_a_billion_laughs_are_few() -> None:
    lines = ["l0: &l0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert told("\n".join(lines)) == ["p.yaml:5: more than 100000 values, each alias counted as what it stands for"]
    nested = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 40))]
    assert told("\n".join(nested)) == ["p.yaml:32: nested deeper than 32 levels"]


def test_a_problem_is_one_line_whatever_is_left_out() -> None:
    assert str(Problem("f", 3, "a.b", "wrong", "right")) == "f:3: a.b: wrong; right"
    assert str(Problem("f", 0, "", "wrong")) == "f: wrong"
    assert str(Problem("f", 0, "", "a\nb\u2028\xa0")) == "f: a\\nb\\u2028\\xa0"
