"""Answers of the families that came after Qwen3-Coder, GLM and Kimi, for every cut of the text."""

from typing import Any

from gateway.chat.formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    GEMMA4,
    LFM2,
    MINIMAX_M2,
    SEED_OSS,
)
from gateway.chat.tool_format import ToolCallFormat
from tests.gateway.chat.call_texts import (
    deepseek_v3,
    deepseek_v31,
    dsml,
    gemma4,
    lfm2,
    minimax,
    quoted,
    seed,
    token,
)

G: Any = ("g", {})
# To schemas of which city is a text, days an integer, tags an array and hot a boolean or null.
TEXT = 'a "b" \\ </paramete\n\n é😀 <tool_call>'
TYPED = {"city": TEXT, "days": "3", "tags": '["a", {"b": 1}]', "hot": "True", "note": "null"}
OBJECT = {"city": TEXT, "days": 3, "tags": ["a", {"b": 1}], "hot": True, "note": None}
ODD = {"days": "three", "kind": "x", "any": "[1", "more": "5"}
TAGS_IN_TEXT = "\n a </parameter> </function> b \n"
LIST = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
LITERALS = r"""f(city='it\'s', days=3, tags=["a", {'b': 1}], hot=True, note=None)"""
LITERAL_OBJECT = {"city": "it's", "days": 3, "tags": ["a", {"b": 1}], "hot": True, "note": None}
APOSTROPHE = """f(city='it's "é"\n', any=-007.50e1)"""
MARKER = """f(city="a ] <|tool_call_end|> )", any={'k': [], "l": {}},)"""
# Each argument says itself whether it is a text; what is none follows the schema.
FLAGGED = {"city": ("true", TEXT), "any": ("true", "3"), "days": ("false", "3")}
FLAGGED |= {"tags": ("false", '["</x>", {}]'), "more": ("false", "[1")}
FLAGGED_OBJECT = {"city": TEXT, "any": "3", "days": 3, "tags": ["</x>", {}], "more": "[1"}
BRACES = 'a } , <tool_call|> "'
BARE = f"f{{city:{quoted(BRACES)},days:3,tags:[{quoted('a')},{{b:1}}],hot:true,note:null}}"

NEWER_CALLS: list[tuple[ToolCallFormat, str, str | None, str, list[tuple[str, Any]]]] = [
    (
        MINIMAX_M2,
        f"Look.\n{minimax(('f', TYPED), ('g', {}))}\nDone.",
        None,
        "Look.Done.",
        [("f", OBJECT), G],
    ),
    (MINIMAX_M2, minimax(("f", ODD)), None, "", [("f", ODD | {"more": "5"})]),
    (MINIMAX_M2, '<invoke name="g">\n</invoke>', None, "", [G]),
    (
        MINIMAX_M2,
        minimax(("f", {"city": TAGS_IN_TEXT})),
        None,
        "",
        [("f", {"city": TAGS_IN_TEXT})],
    ),
    (SEED_OSS, f"Look. {seed('f', **TYPED)}", None, "Look.", [("f", OBJECT)]),
    (SEED_OSS, seed("g") + seed("f", days="1"), None, "", [G, ("f", {"days": 1})]),
    (
        DEEPSEEK_V31,
        "A. " + deepseek_v31(("f", '{"a": "}"}'), ("g", "{}")) + " B.",
        None,
        "A.B.",
        [("f", {"a": "}"}), G],
    ),
    (DEEPSEEK_V31, deepseek_v3(("f", '{"a": 1}')), None, "", [("f", {"a": 1})]),
    (
        DEEPSEEK_V3,
        deepseek_v3(("f", '{"a": "```"}'), ("g", "{}")),
        None,
        "",
        [("f", {"a": "```"}), G],
    ),
    (
        DEEPSEEK_V32,
        f"Look.\n\n{dsml('function_calls', ('f', FLAGGED), ('g', {}))}",
        None,
        "Look.",
        [("f", FLAGGED_OBJECT), G],
    ),
    (DEEPSEEK_V4, dsml("tool_calls", ("f", FLAGGED)), None, "", [("f", FLAGGED_OBJECT)]),
    (DEEPSEEK_V3, deepseek_v31(("g", "{}")).removesuffix(token("tool calls end")), None, "", [G]),
    (LFM2, "Look. " + lfm2(LITERALS, "g()"), None, "Look.", [("f", LITERAL_OBJECT), G]),
    (LFM2, lfm2(APOSTROPHE), None, "", [("f", {"city": 'it\'s "é"\n', "any": -75.0})]),
    (
        LFM2,
        lfm2(MARKER) + "x",
        None,
        "x",
        [("f", {"city": "a ] <|tool_call_end|> )", "any": {"k": [], "l": {}}})],
    ),
    (LFM2, lfm2("f(days=1, days=2)", "more"), None, ", more]", [("f", {"days": 1})]),
    (LFM2, f"<|tool_call_start|>{LIST}<|tool_call_end|>", None, "", [("f", {"a": 1}), G]),
    (
        GEMMA4,
        f"Look. {gemma4(BARE)}Done.",
        None,
        "Look.Done.",
        [("f", LITERAL_OBJECT | {"city": BRACES})],
    ),
    (
        GEMMA4,
        gemma4("g{}") + gemma4(f"f{{{quoted('a b')}: 1.5 , c : {{}}}}"),
        None,
        "",
        [G, ("f", {"a b": 1.5, "c": {}})],
    ),
    (
        GEMMA4,
        gemma4(r'f{"a": "é\"\u00e9", b:[{"c": "d"}]}'),
        None,
        "",
        [("f", {"a": 'é"é', "b": [{"c": "d"}]})],
    ),
    (GEMMA4, gemma4("g{}").removesuffix("<tool_call|>"), None, "", [G]),
]
NO_CALLS_OF_LFM2 = ("", "unknown(a=1)", "f(1)", "f(a=b)", "f(a=1", "f(a='x)", "f(=1)", "f(a=1 2)")
NO_CALLS_OF_GEMMA4 = (
    "unknown{}",
    "f",
    "f{a}",
    "f{a:x}",
    "f{a:1",
    "f{:1}",
    'f{a:<|"|>x}',
    "f{a:1,b}",
)
NEWER_TEXTS = [
    (MINIMAX_M2, 'A <invoke name="f"> is a call'),
    (MINIMAX_M2, minimax(("unknown", {"a": "1"}))),
    (SEED_OSS, "<seed:tool_call>\n<function=unknown></function></seed:tool_call>"),
    (DEEPSEEK_V31, deepseek_v31(("unknown", "{}"))),
    (DEEPSEEK_V31, deepseek_v31(("f", "a=1"))),
    (DEEPSEEK_V32, dsml("tool_calls", ("unknown", {}))),
    (DEEPSEEK_V32, dsml("function_calls", ("unknown", {"a": ("true", "1")}))),
    (DEEPSEEK_V4, dsml("tool_calls").replace("invoke", "f")),
    (DEEPSEEK_V3, token("tool calls begin") + "f"),
    (DEEPSEEK_V3, f"{token('tool calls begin')}{token('tool call begin')}{'f' * 300}"),
    *((LFM2, lfm2(text)) for text in NO_CALLS_OF_LFM2),
    *((LFM2, lfm2(f"f(a={text})")) for text in ("[" * 999, "1e", "{1: 2}", "[1 2]", "x" * 5000)),
    (LFM2, "<|tool_call_start|>f(a=1)<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[" + "f" * 300 + "("),
    *((GEMMA4, gemma4(text)) for text in NO_CALLS_OF_GEMMA4),
    *(
        (GEMMA4, gemma4(f"f{{{text}}}"))
        for text in ("'a':1", "a:1,b", "a:[1 2]", "a" * 5000 + ":1")
    ),
    (GEMMA4, "<|tool_call>f{}<tool_call|>"),
    (GEMMA4, f"<|tool_call>call:{'f' * 300}{{}}"),
]
