"""Reads the text of a compiled program: what it computes and keeps in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

PASSED_ON = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional", "call", "constant"}
"""Operations that compute nothing."""
COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"^ *(ROOT )?%\S+ = (\(.*?\)|\w+\[[\d,]*\]\S*) ([\w-]+)\(")
ASSIGNMENT = re.compile(r"^ *(ROOT )?%\S+ = ")
SHAPE = re.compile(r"\w+\[([\d,]*)\]")
CALLED = re.compile(r" fusion\(.* calls=%([\w.-]+)")


@dataclass(frozen=True)
class Instruction:
    shapes: tuple[tuple[int, ...], ...]
    """The shape of its result, or of each of its results."""
    operation: str
    """For a fusion, the operation at its root."""
    text: str

    def holds(self, shape: Sequence[int]) -> bool:
        """Whether a result has this shape, with its axes in any order."""
        return any(sorted(own) == sorted(shape) for own in self.shapes)


def computed(text: str) -> list[Instruction]:
    """The instructions that leave something new in memory."""
    made = [instruction for instruction in instructions(text) if instruction.operation not in PASSED_ON]
    assert len(made) > 10, "a program has more instructions than that"
    return made


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions whose results are in memory; of those inside a fusion that is only the root."""
    fused = {found[1] for line in text.splitlines() if (found := CALLED.search(line))}
    roots: dict[str, str] = {}
    waiting: list[tuple[Instruction, str]] = []
    computation = ""
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            computation = found[1]
        elif found := INSTRUCTION.match(line):
            is_root, result, operation = found.groups()
            if is_root:
                roots[computation] = operation
            if computation not in fused:
                called = CALLED.search(line)
                shapes = tuple(
                    tuple(int(size) for size in shape.split(",") if size) for shape in SHAPE.findall(result)
                )
                waiting.append((Instruction(shapes, operation, line.strip()), called[1] if called else ""))
        else:
            assert not ASSIGNMENT.match(line), f"the text was not understood: {line}"
    for instruction, called_name in waiting:
        yield replace(instruction, operation=roots[called_name]) if called_name else instruction
