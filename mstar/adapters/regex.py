"""A regular expression matcher that cannot hang: the patterns come from files that strangers wrote.

A pattern is compiled to a small program that is run on all its states at once (Thompson's construction, as in Pike's machine), so the
time is linear in the text, where a backtracking matcher takes exponential time on `(a+)+`. Understood are literals, `.`, classes,
`\\d \\w \\s` and their opposites, groups, `|`, `* + ? {m,n}` (lazy ones too: whether there is a match is the same), `^ $`. All else
raises PatternProblem. Texts are ASCII without line breaks: module names.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import dataclass

MAX_PATTERN = 1024
MAX_PROGRAM = 2000
MAX_DEPTH = 30
MAX_REPEAT = 1000

_WORD = frozenset(string.ascii_letters + string.digits + "_")
_CLASSES = {"d": frozenset(string.digits), "w": _WORD, "s": frozenset(string.whitespace)}
_ASCII = frozenset(map(chr, range(128)))
_ANY = _ASCII - {"\n"}
_REPEAT = re.compile(r"\{([0-9]{1,6})?(,)?([0-9]{1,6})?\}")


class PatternProblem(ValueError):
    """The pattern cannot be used; the text completes a sentence about it (`has an unclosed group`)."""


@dataclass
class Budget:
    """Steps that may still be spent; shared by all patterns of an adapter."""

    steps: int

    def spend(self, steps: int) -> None:
        """Take `steps`. Raises PatternProblem when there are not so many left."""
        self.steps -= steps
        if self.steps < 0:
            raise PatternProblem("takes too long to match")


# A node emits its part of a program; the program runs on to the instruction after it.
Node = Callable[["_Program"], None]


@dataclass
class _Program:
    """Instructions: a set of characters to take, or a tuple of where to go on (`$` and `^` hold at the ends alone)."""

    code: list[frozenset[str] | tuple[int, ...] | str]
    work: int = 0

    def emit(self, instruction: frozenset[str] | tuple[int, ...] | str) -> int:
        self.charge()
        self.code.append(instruction)
        return len(self.code) - 1

    def charge(self) -> None:
        self.work += 1
        if self.work > MAX_PROGRAM:
            raise PatternProblem("is too large")


class Regex:
    """`re.match(rf"(.*\\.)?({pattern})$", text)` as a yes or no: PEFT's rule for its patterns."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN:
            raise PatternProblem(f"is longer than {MAX_PATTERN} characters")
        program = _Program([])
        _Parser(pattern).parse()(program)
        self._accept = program.emit("match")
        self._code = program.code
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(self, text: str, budget: Budget) -> bool:
        """Whether `text` as a whole, or what follows one of its dots, matches. Spends from `budget`."""
        end = len(text)
        states = self._closure({0}, at_start=True, at_end=end == 0)
        for position, char in enumerate(text, start=1):
            step = (states, char)
            following = self._steps.get(step) if position < end else None
            if following is None:
                budget.spend(len(states) + len(self._code))
                taken = {state + 1 for state in states if isinstance(self._code[state], frozenset) and char in self._code[state]}
                if char == ".":
                    taken.add(0)
                following = self._closure(taken, at_start=False, at_end=position == end)
                if position < end:
                    self._steps[step] = following
            budget.spend(1)
            states = following
        return self._accept in states

    def _closure(self, states: set[int], *, at_start: bool, at_end: bool) -> frozenset[int]:
        """All instructions that are reached without taking a character."""
        seen, todo = set(states), list(states)
        while todo:
            state = todo.pop()
            instruction = self._code[state]
            if isinstance(instruction, tuple):
                ways = instruction
            elif (instruction == "^" and at_start) or (instruction == "$" and at_end):
                ways = (state + 1,)
            else:
                continue
            todo += [way for way in ways if way not in seen]
            seen.update(ways)
        return frozenset(seen)


class _Parser:
    """Recursive descent over the pattern; the result is a node."""

    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0
        self.depth = 0

    def parse(self) -> Node:
        node = self.alternatives()
        if self.at < len(self.text):
            raise PatternProblem("has a `)` too many")
        return node

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        char = self.peek()
        if not char:
            raise PatternProblem("ends too early")
        self.at += 1
        return char

    def alternatives(self) -> Node:
        nodes = [self.sequence()]
        while self.peek() == "|":
            self.at += 1
            nodes.append(self.sequence())
        return nodes[0] if len(nodes) == 1 else _either(nodes)

    def sequence(self) -> Node:
        nodes: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            nodes.append(self.repeated(self.atom()))
        return _in_turn(nodes)

    def atom(self) -> Node:
        char = self.take()
        if char == "(":
            return self.group()
        if char == "[":
            return _one_of(self.char_class())
        if char == ".":
            return _one_of(_ANY)
        if char in "^$":
            return _instruction(char)
        if char in "*+?{":
            raise PatternProblem(f"has a `{char}` with nothing to repeat")
        return _one_of(self.escape() if char == "\\" else frozenset(char))

    def group(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise PatternProblem("is nested too deeply")
        if self.peek() == "?":
            if self.text[self.at : self.at + 2] != "?:":
                raise PatternProblem("has a group of a kind that is not served")
            self.at += 2
        node = self.alternatives()
        if self.peek() != ")":
            raise PatternProblem("has a group that does not end")
        self.at += 1
        self.depth -= 1
        return node

    def repeated(self, node: Node) -> Node:
        char = self.peek()
        if not char or char not in "*+?{":
            return node
        if char == "{":
            low, high = self.bounds()
        else:
            self.at += 1
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if self.peek() == "?":
            self.at += 1
        if self.peek() and self.peek() in "*+?{":
            raise PatternProblem("repeats a repetition")
        return _repeat(node, low, high)

    def bounds(self) -> tuple[int, int | None]:
        match = _REPEAT.match(self.text, self.at)
        if not match or not (match[1] or match[2]):
            raise PatternProblem("has a `{` that is no repetition")
        self.at = match.end()
        low = int(match[1] or 0)
        high = int(match[3]) if match[3] else (None if match[2] else low)
        if low > MAX_REPEAT or (high is not None and not low <= high <= MAX_REPEAT):
            raise PatternProblem("has a repetition out of bounds")
        return low, high

    def escape(self) -> frozenset[str]:
        char = self.take()
        if char.lower() in _CLASSES:
            chars = _CLASSES[char.lower()]
            return chars if char.islower() else _ASCII - chars
        if char.isalnum():
            raise PatternProblem(f"has the escape `\\{char}`, which is not served" if char.isascii() else "has an unknown escape")
        return frozenset(char)

    def char_class(self) -> frozenset[str]:
        negated = self.peek() == "^"
        self.at += negated
        chars: set[str] = set()
        first = True
        while first or self.peek() != "]":
            first = False
            low = self.class_item()
            following = self.text[self.at : self.at + 2]
            if following[:1] == "-" and following[1:] not in ("", "]") and len(low) == 1:
                self.at += 1
                high = self.class_item()
                if len(high) != 1 or min(high) < min(low):
                    raise PatternProblem("has a bad range of characters")
                low = frozenset(char for char in _ASCII if min(low) <= char <= min(high))
            chars |= low
        self.at += 1
        return frozenset(_ASCII - chars if negated else chars)

    def class_item(self) -> frozenset[str]:
        char = self.take()
        return self.escape() if char == "\\" else frozenset(char)


def _one_of(chars: frozenset[str]) -> Node:
    return lambda program: _ignore(program.emit(chars))


def _instruction(name: str) -> Node:
    return lambda program: _ignore(program.emit(name))


def _ignore(_: int) -> None:
    """A node has no result."""


def _in_turn(nodes: list[Node]) -> Node:
    def emit(program: _Program) -> None:
        program.charge()
        for node in nodes:
            node(program)

    return emit


def _either(nodes: list[Node]) -> Node:
    def emit(program: _Program) -> None:
        fork = program.emit(())
        starts, jumps = [], []
        for node in nodes:
            starts.append(len(program.code))
            node(program)
            jumps.append(program.emit(()))
        program.code[fork] = tuple(starts)
        for jump in jumps:
            program.code[jump] = (len(program.code),)

    return emit


def _repeat(node: Node, low: int, high: int | None) -> Node:
    def emit(program: _Program) -> None:
        for _ in range(low):
            program.charge()
            node(program)
        if high is None:
            fork = program.emit(())
            node(program)
            program.emit((fork,))
            program.code[fork] = (fork + 1, len(program.code))
            return
        forks = []
        for _ in range(high - low):
            forks.append(program.emit(()))
            node(program)
        for fork in forks:
            program.code[fork] = (fork + 1, len(program.code))

    return emit
