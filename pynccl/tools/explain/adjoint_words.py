"""The adjoint of each operation in words. Notation: words.py; G is the cotangent of y as the ranks have it together."""

from __future__ import annotations

from typing import NamedTuple

from .operations import REPLICATED, SUM


class AdjointWords(NamedTuple):
    formula: str
    does: str


_NO_MESSAGE = "Nothing is sent. "
_WHOLE = _NO_MESSAGE + "Every rank goes on alike with y, so each has the whole cotangent already. "
_PARTS = "Each rank goes on with work of its own, and has a part of the cotangent: the parts are added. "

# (way, operator, convention) -> the adjoint in words
ADJOINT_WORDS: dict[tuple[str, str, str], AdjointWords] = {
    ("all_reduce", "sum", SUM): AdjointWords(
        "gradient of x_r = sum over q of g_q", _PARTS + "The adjoint of this all_reduce is an all_reduce."
    ),
    ("all_reduce", "avg", SUM): AdjointWords(
        "gradient of x_r = 1/N * sum over q of g_q", _PARTS + "Each x_r has 1/N of the effect on y."
    ),
    ("all_reduce", "sum", REPLICATED): AdjointWords("gradient of x_r = g", _WHOLE + "x_r moves y as much as y moves."),
    ("all_reduce", "avg", REPLICATED): AdjointWords(
        "gradient of x_r = g / N", _WHOLE + "Each x_r has 1/N of the effect on y."
    ),
    ("reduce_scatter", "sum", ""): AdjointWords(
        "gradient of x_r = (g_0, g_1, .., g_N-1) on every rank",
        "Every rank's block q went into rank q's sum, so it gets rank q's cotangent: an all_gather.",
    ),
    ("reduce_scatter", "avg", ""): AdjointWords(
        "gradient of x_r = (g_0, g_1, .., g_N-1) / N on every rank",
        "Every rank's block q is 1/N of rank q's mean: the cotangents, divided by N, in an all_gather.",
    ),
    ("all_gather", "", SUM): AdjointWords(
        "gradient of x_r = sum over q of g_q[block r]",
        "Every rank has a copy of x_r, and a cotangent for it in block r: these N are added, and the sum goes to rank "
        "r. That is a reduce_scatter.",
    ),
    ("all_gather", "", REPLICATED): AdjointWords(
        "gradient of x_r = g[block r]", _WHOLE + "Rank r takes the block that is about its own x."
    ),
    ("broadcast", "", SUM): AdjointWords(
        "gradient of x_root = sum over q of g_q;  others: 0",
        "Each rank has a copy and a cotangent for it: these are added on root. That is a reduce.",
    ),
    ("broadcast", "", REPLICATED): AdjointWords(
        "gradient of x_root = g;  others: 0", _WHOLE + "What the others held was not read."
    ),
    ("reduce", "sum", ""): AdjointWords(
        "gradient of x_r = g_root on every rank",
        "Each rank's x went into root's sum: each gets root's cotangent, by a broadcast. The others' cotangents belong "
        "to zeros and are not read.",
    ),
    ("reduce", "avg", ""): AdjointWords(
        "gradient of x_r = g_root / N on every rank",
        "Each rank's x is 1/N of root's mean: each gets root's cotangent, divided by N, by a broadcast.",
    ),
    ("scatter", "", ""): AdjointWords(
        "gradient of x_root = (g_0, g_1, .., g_N-1);  others: 0",
        "Each block goes back to where it came from: a gather to root.",
    ),
    ("gather", "", ""): AdjointWords(
        "gradient of x_r = g_root[block r]", "Each block goes back to where it came from: a scatter from root."
    ),
    ("all_to_all", "", ""): AdjointWords(
        "gradient of x_r = (g_0[block r], .., g_N-1[block r])",
        "Each block goes back to where it came from: again an all_to_all.",
    ),
    ("permute", "", ""): AdjointWords(
        "gradient of x_r = sum of g_q over the edges (r, q), here g_r+1",
        "The edges are reversed. A rank that sent to nobody gets 0; one that sent to several adds what comes back.",
    ),
    ("send_recv", "", ""): AdjointWords(
        "gradient of x_{root} = g_{target};  others: 0",
        "The message goes back: the receiver sends, the sender receives.",
    ),
    ("halo_exchange", "", ""): AdjointWords(
        "gradient of a border = its own cotangent + that of its copy;  of a halo that was written over = 0",
        "What came to a halo goes back to the border that it is a copy of, and is added there.",
    ),
    ("copy", "", ""): AdjointWords(
        "gradient of x = sum over q of g_q, on every rank", _PARTS + "That is an all_reduce."
    ),
    ("split", "", ""): AdjointWords(
        "gradient of x = (g_0, g_1, .., g_N-1) on every rank",
        "Each rank has the cotangent of its own block only: an all_gather puts them together.",
    ),
}
for _op, _formula, _sentence in (
    (
        "max",
        "gradient of x_r = G where x_r is the largest, over the number of ranks that tie; 0 elsewhere",
        "Only the ranks that have the largest element get its cotangent, and share it if they tie.",
    ),
    (
        "min",
        "gradient of x_r = G where x_r is the smallest, over the number of ranks that tie; 0 elsewhere",
        "Only the ranks that have the smallest element get its cotangent, and share it if they tie.",
    ),
    (
        "prod",
        "gradient of x_r = G * product of the other ranks' x",
        "Zeros are counted, so that nothing is divided by zero: with one zero its rank alone gets a gradient, with "
        "two nobody does.",
    ),
    ("premul", "gradient of x_r = a_r * G", "Rank r's x went in times a_r, and so does its gradient come back."),
):
    ADJOINT_WORDS["all_reduce", _op, SUM] = AdjointWords(f"{_formula};  G = sum over q of g_q", _PARTS + _sentence)
    ADJOINT_WORDS["all_reduce", _op, REPLICATED] = AdjointWords(f"{_formula};  G = g", _WHOLE + _sentence)
