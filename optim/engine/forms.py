"""The tuple of a parameter group, built once for all values of its hyperparameters.

A rule is a function from hyperparameters to a tuple. Those that are floats, alone or in a tuple, are numbers of a step,
as a learning rate is: the rule is called with numbers that remember how they were computed (`axes.programs.numbers`),
and a scheduler that changes them changes nothing else. All others, and floats that decide what the tuple is made of (a
momentum of zero has no buffer), make another tuple. Tensors are numbers too; one on a device is never waited for, and
what it is when its group is made decides.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, final

from torch import Tensor

from axes.core.declared import forgotten, resolved
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.capabilities import require_parameter
from axes.optim.engine.kept import number_on
from axes.programs.numbers import Origin, formula

D = TypeVar("D")
Group = dict[str, Any]  # a parameter group
Rule = Callable[..., StateUpdate]
_KEPT = 512
_NUMBER = (float, Tensor)


@final
class Form:
    """A tuple whose numbers are hyperparameters: what decides how a group is stepped, and stays while they change."""

    def __init__(self, update: StateUpdate, origin: Origin) -> None:
        self.update, self.origin = update, origin


@final
class Today:
    """What the rule and the hyperparameters of a group come to, until one of these changes."""

    def __init__(self, rule: Rule, given: list[Any], form: Form, hyperparameters: list[Any]) -> None:
        """hyperparameters: the numbers among `given`, floats, or tensors where they are on a device."""
        self.rule, self.given, self.form, self.hyperparameters = rule, given, form, hyperparameters
        self.seen: list[Any] = []  # the group's own values, if none of them can change where it is
        self._asked = -1
        self._parts: dict[int, tuple[Any, Any]] = {}
        self._numbers: dict[str, float | Tensor] = {}

    def is_of(self, rule: Rule, values: list[Any]) -> bool:
        """Whether these are the very objects that it was made of, and none of them can have changed."""
        return bool(self.seen) and self.rule is rule and all(map(operator.is_, self.seen, values))

    def moved(self, values: list[Any]) -> Today | None:
        """Of values that differ from the group's own in floats alone, as schedules move them; None for others."""
        if not self.seen or not all(map(_moves, self.seen, values)):
            return None
        now = self if values == self.seen else Today(self.rule, values, self.form, _floats(values))
        now.seen = values
        return now if now.holds else None

    @property
    def holds(self) -> bool:
        """Whether all that was asked of the form's numbers, by now, is as true of these."""
        origin = self.form.origin
        if self._asked != len(origin.asked):
            values = zip(self.hyperparameters, origin.values, strict=True)
            if not origin.holds([x if isinstance(x, float) else y for x, y in values]):
                return False
            self._asked = len(origin.asked)
        return True

    @property
    def update(self) -> StateUpdate:
        """The tuple, with plain numbers."""
        return self.of(self.form.update)

    def of(self, part: D) -> D:
        """The form, or what was made of it, with plain numbers."""
        known = self._parts.get(id(part))
        if known is None:
            known = self._parts[id(part)] = (part, resolved(part, [float(x) for x in self.hyperparameters]))
        return known[1]

    @property
    def numbers(self) -> Mapping[str, float | Tensor]:
        """The numbers that programs read, by their formulas."""
        used = self.form.origin.used
        if len(self._numbers) != len(used):
            given = self.hyperparameters
            there = next((x.device for x in given if isinstance(x, Tensor)), None)
            if there is not None:
                given = [number_on(there, x) for x in given]
            self._numbers = {text: formula(text)(given) for text in used}
        return self._numbers


@final
class Forms:
    """The tuples of an optimizer's groups; one is looked at again only when hyperparameters change."""

    def __init__(self, who: str, rules: Mapping[str, Rule], followed: Callable[[StateUpdate], bool]) -> None:
        """followed: whether the numbers of a tuple can be followed through a step."""
        self.who, self.rules, self.followed = who, rules, followed
        self._last: dict[int, Today] = {}

    def today(self, group: Group) -> Today:
        """Of a group.

        Raises:
            AxesError: hyperparameters that make no sense.
        """
        rule = self.rules[group["rule"]]
        values = [group[name] for name in _names(rule)]
        last = self._last.get(id(group))
        if last is not None and last.is_of(rule, values) and last.holds:
            return last
        if last is not None and last.rule is rule and (moved := last.moved(values)) is not None:
            self._last[id(group)] = moved
            return moved
        found = self._found(group, rule, values, last)
        found.seen = values if all(map(_stays, values)) else []
        return found

    def _found(self, group: Group, rule: Rule, values: list[Any], last: Today | None) -> Today:
        given = [_read(value) for value in values]
        if last is not None and last.rule is rule and _same(last.given, given) and last.holds:
            return last
        self._require_single(rule, given)
        hyperparameters = _floats(given)
        if last is not None and last.rule is rule and _alike(last.given, given):
            now = Today(rule, given, last.form, hyperparameters)
            if now.holds:
                self._last[id(group)] = now
                return now
        form = _form(rule, given, [float(x) for x in hyperparameters], self.followed)
        now = self._last[id(group)] = Today(rule, given, form, hyperparameters)
        return now

    def _require_single(self, rule: Rule, given: list[Any]) -> None:
        for name, value in zip(_names(rule), given, strict=True):
            for x in value if isinstance(value, tuple) else (value,):
                if isinstance(x, Tensor) and x.numel() != 1:
                    raise AxesError(
                        f"{self.who}: {name} is a number, or a tensor of one element, not of shape {tuple(x.shape)}"
                    )


@functools.cache
def _names(rule: Rule) -> tuple[str, ...]:
    return tuple(inspect.signature(rule).parameters)


def plain(value: Any) -> Any:
    """A hyperparameter with real numbers of numpy and others as Python's, alone or among others."""
    if type(value) is tuple or type(value) is list:
        found = [plain(x) for x in value]
        return value if all(map(operator.is_, found, value)) else type(value)(found)
    if isinstance(value, bool | int | Tensor) or type(value) is float:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _read(value: Any) -> Any:
    """A hyperparameter as rules take it: lists as tuples, tensors on the host as floats."""
    if isinstance(value, tuple | list):
        return tuple(_read(x) for x in value)
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else value
    return plain(value)


def _stays(value: Any) -> bool:
    """Whether a value is what it was while it is the same object."""
    if type(value) is tuple:
        return all(map(_stays, value))
    return type(value) in (float, int, bool, str, type(None))


def _is_number(x: Any) -> bool:
    return isinstance(x, _NUMBER)


def _moves(old: Any, new: Any) -> bool:
    """Whether a hyperparameter is what it was, or another float in its place."""
    if old is new or type(old) is float and type(new) is float:
        return True
    return type(old) is tuple and type(new) is tuple and len(old) == len(new) and all(map(_moves, old, new))


def _floats(given: list[Any]) -> list[Any]:
    found: list[Any] = []
    for value in given:
        if type(value) is float:
            found.append(value)
        else:
            found += filter(_is_number, value if isinstance(value, tuple) else (value,))
    return found


def _replaced(given: list[Any], number: Callable[[Any], Any]) -> list[Any]:
    """With something in the place of every number."""

    def one(x: Any) -> Any:
        return number(x) if _is_number(x) else x

    return [tuple(one(x) for x in value) if isinstance(value, tuple) else one(value) for value in given]


def _filled(given: list[Any], values: Iterable[Any]) -> list[Any]:
    """With these in the places of the numbers, one after another."""
    rest = iter(values)
    return _replaced(given, lambda x: next(rest))


def _same(last: list[Any], given: list[Any]) -> bool:
    pairs = zip(last, given, strict=True)
    return all(x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y) for x, y in pairs)


def _alike(last: list[Any], given: list[Any]) -> bool:
    """Whether two lists differ in numbers only."""
    return _replaced(last, lambda x: float) == _replaced(given, lambda x: float)


_FORMS: OrderedDict[Any, list[Form]] = OrderedDict()  # by rule and what is no number, the latest first


def _form(rule: Rule, given: list[Any], values: list[float], followed: Callable[[StateUpdate], bool]) -> Form:
    """The form of a rule for which what was asked of its numbers holds."""
    key = (rule, tuple(_replaced(given, lambda x: float)))
    known = _FORMS.setdefault(key, [])
    _FORMS.move_to_end(key)
    while len(_FORMS) > _KEPT:
        _FORMS.popitem(last=False)
    for form in known:
        if form.origin.holds(values):
            return form
    form = _built(rule, given, values, followed)
    known.insert(0, form)
    del known[_KEPT:]
    return form


def _built(rule: Rule, given: list[Any], values: list[float], followed: Callable[[StateUpdate], bool]) -> Form:
    origin = Origin(values)
    try:
        update = _declared(rule, _filled(given, origin.numbers()))
        if not forgotten(update) and followed(update):
            return Form(update, origin)
    except Exception:  # what does not take such a number, or is refused: plain floats make the tuple, or the message
        pass
    origin.fix()
    return Form(_declared(rule, _filled(given, values)), origin)


def _declared(rule: Rule, given: list[Any]) -> StateUpdate:
    update = rule(**dict(zip(_names(rule), given, strict=True))).normal()
    require_parameter(update)
    return update


__all__ = ["Form", "Forms", "Today", "plain"]
