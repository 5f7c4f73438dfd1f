"""Compares two states of the contract and classifies each difference as a minor or a major change.

A change is *minor* if a plugin for the old state works unchanged with the new one, otherwise *major*. Minor changes are
additions that plugins may use or implement. Major changes are members that were removed, renamed, given another type or
another phase, or became required, and a new parameter of a method that plugins implement, since core passes it.

Compilers of graph platforms must name the operations that are refused if they are left out, so one that is added is a
major change; one that is traced or unused if it is left out is minor. A capability that GraphPlatform begins to claim
is major: compilers that were written before inherit the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mvllm_conformance.contract_operations import Operation
from mvllm_conformance.contract_surface import REFUSED, TRACED, GraphContractOperation, Member, Name, Surface

MINOR = "minor"
MAJOR = "major"


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        step: MINOR or MAJOR.
        text: The change, with the name of the member.
    """

    step: str
    text: str

    def __str__(self) -> str:
        return f"{self.step}: {self.text}"


def changes(old: Surface, new: Surface) -> list[Change]:
    """The differences, in the order of the names, without the version number."""
    return list(_changes(old, new))


def needed_version(old: tuple[int, int], found: list[Change]) -> tuple[int, int]:
    """The lowest contract version that permits the changes `found` since the version `old`."""
    if any(change.step == MAJOR for change in found):
        return (old[0] + 1, 0)
    return (old[0], old[1] + 1) if found else old


def _changes(old: Surface, new: Surface) -> Iterator[Change]:
    if old.entry_points != new.entry_points:
        yield Change(MAJOR, f"the entry points' group was {old.entry_points}, is {new.entry_points}")
    yield from _members("hook ", old.hooks, new.hooks, written_by_plugins=True)
    for name in sorted(old.names.keys() | new.names.keys()):
        before, after = old.names.get(name), new.names.get(name)
        if before is None:
            yield Change(MINOR, f"{name} was added")
        elif after is None:
            yield Change(MAJOR, f"{name} was removed")
        else:
            yield from _name(name, before, after)
    for name in sorted(old.operations.keys() | new.operations.keys()):
        is_, was = new.operations.get(name), old.operations.get(name)
        if was is None:
            yield Change(MINOR, f"operation {name} was added")
        elif is_ is None:
            yield Change(MAJOR, f"operation {name} was removed")
        else:
            yield from _operation(f"operation {name}", was, is_)
    if old.graph_operations:
        yield from _graph_operations(old.graph_operations, new.graph_operations)
        yield from _graph_capabilities(old.graph_capabilities, new.graph_capabilities)
    elif new.graph_operations:  # the file is of a core whose contract had none
        yield Change(MINOR, "the operations of graphs and GraphPlatform's capabilities were added")


def _graph_operations(
    old: dict[str, GraphContractOperation], new: dict[str, GraphContractOperation]
) -> Iterator[Change]:
    """What a change means for a compiler that names the old operations."""
    means = {
        REFUSED: "compilers that do not name it cannot run models whose graphs have it",
        TRACED: "for compilers that do not name it, it is traced as array operations",
    }
    for name in sorted(old.keys() | new.keys()):
        was, is_ = old.get(name), new.get(name)
        title = f"graph operation {name}"
        if is_ is None:
            yield Change(MAJOR, f"{title} was removed")
            continue
        meaning = means.get(is_.if_left_out, "it occurs only if a compiler names it")
        if was is None:
            yield Change(MAJOR if is_.if_left_out == REFUSED else MINOR, f"{title} ({is_.group}) was added: {meaning}")
            continue
        if was.if_left_out != is_.if_left_out:
            step = MAJOR if is_.if_left_out == REFUSED else MINOR
            yield Change(step, f"{title}: if left out, it was {was.if_left_out}, is {is_.if_left_out}: {meaning}")
        if (was.parameters, was.type) != (is_.parameters, is_.type):
            before, after = (f"({', '.join(one.parameters)}) -> {one.type}" for one in (was, is_))
            yield Change(MAJOR, f"{title}: its signature was {before}, is {after}")


def _graph_capabilities(old: dict[str, str], new: dict[str, str]) -> Iterator[Change]:
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, "not claimed"), new.get(name, "not claimed")
        if before != after:
            yield Change(MAJOR, f"GraphPlatform.capabilities: {name} was {before}, is {after}")


def _operation(name: str, old: Operation, new: Operation) -> Iterator[Change]:
    """Core calls the functions of providers, so a new parameter is major. Descriptions may change."""
    if (old.parameters, old.type) != (new.parameters, new.type):
        before, after = (f"({', '.join(one.parameters)}) -> {one.type}" for one in (old, new))
        yield Change(MAJOR, f"{name}: its signature was {before}, is {after}")
    kinds: tuple[tuple[str, Iterable[str], Iterable[str]], ...] = (
        ("fact", old.facts, new.facts),
        ("right to overwrite", old.may_overwrite, new.may_overwrite),
        ("update of", old.updates, new.updates),
    )
    for what, had, has in kinds:
        yield from (Change(MAJOR, f"{name}: its {what} {one} was removed") for one in had if one not in set(has))
        yield from (Change(MINOR, f"{name}: its {what} {one} was added") for one in has if one not in set(had))


def _name(name: str, old: Name, new: Name) -> Iterator[Change]:
    for what in ("kind", "bases", "phase"):
        before, after = getattr(old, what), getattr(new, what)
        if before != after:
            yield Change(MAJOR, f"{name}: its {what} was {_shown(before)}, is {_shown(after)}")
    if new.keyword_only and not old.keyword_only:
        yield Change(MAJOR, f"{name}: its fields are given by keyword now")
    if old.itself is not None and new.itself is not None:
        yield from _member(name, old.itself, new.itself, written_by_plugins=False)
    yield from _members(f"{name}.", old.members, new.members, written_by_plugins=new.written_by_plugins)
    yield from _order(name, old, new)


def _members(
    prefix: str, old: dict[str, Member], new: dict[str, Member], *, written_by_plugins: bool
) -> Iterator[Change]:
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = old.get(name), new.get(name)
        if before is None:
            assert after is not None
            needed = ", and is required" if after.required else ""
            yield Change(MAJOR if after.required else MINOR, f"{prefix}{name} was added{needed}")
        elif after is None:
            yield Change(MAJOR, f"{prefix}{name} was removed")
        else:
            yield from _member(f"{prefix}{name}", before, after, written_by_plugins=written_by_plugins)


def _member(name: str, old: Member, new: Member, *, written_by_plugins: bool) -> Iterator[Change]:
    for what in ("kind", "type", "default", "phase"):
        before, after = getattr(old, what), getattr(new, what)
        # A new default relaxes the contract; that the member is no longer required is reported below.
        if before != after and not (what == "default" and before is None and not new.required and old.required):
            yield Change(MAJOR, f"{name}: its {what} was {_shown(before)}, is {_shown(after)}")
    if old.required != new.required:
        yield Change(MAJOR if new.required else MINOR, f"{name} is {'now' if new.required else 'no longer'} required")
    if old.parameters != new.parameters:
        only_more = _adds_only_optional(old.parameters, new.parameters) and not written_by_plugins
        before, after = ", ".join(old.parameters), ", ".join(new.parameters)
        yield Change(MINOR if only_more else MAJOR, f"{name}: its parameters were ({before}), are ({after})")


def _adds_only_optional(old: list[str], new: list[str]) -> bool:
    """Whether every call with the old parameters is valid with the new ones."""
    more = [parameter for parameter in new[len(old) :] if parameter != "*"]
    return new[: len(old)] == old and all(" = " in parameter or parameter.startswith("**") for parameter in more)


def _order(name: str, old: Name, new: Name) -> Iterator[Change]:
    """Fields can be passed by position, so they keep their order and new ones come last."""
    if old.keyword_only:
        return
    before = [member for member, facts in old.members.items() if facts.kind == "field" and member in new.members]
    after = [member for member, facts in new.members.items() if facts.kind == "field"]
    if before != after[: len(before)] and set(before) <= set(after):
        moved = next(member for member, kept in zip(after, before) if member != kept)
        yield Change(MAJOR, f"{name}: {moved} is at the position of {before[after.index(moved)]}; new fields come last")


def _shown(value: object) -> str:
    text = ", ".join(value) if isinstance(value, list) else value
    return str(text) if text not in (None, "") else "none"
