"""Which rule takes which parameter, and as what matrices: what was said of it, else what is known of it.

    rules={"*.mixer.kernel": "muon", nn.Bilinear: "adamw"}       the rule, by name or by type of module
    matrices={"*.experts.up": "experts in out"}                  a hidden matrix, and how it is one (`layouts`)
    qkv="split" or "heads"                                       fused projections, as three matrices or head by head

A key is a parameter's name, a pattern of names (fnmatch), or a type of modules, which means all that they hold. A name
goes before a pattern, a pattern before a type; of several patterns the first counts, of several types the nearest
module's; rules and matrices are compared alike. A parameter group that names its rule goes before all of them. Where a
key says the rule for matrices it means the matrices among what it matches: biases and gains stay with the auxiliary
rule.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, final

from torch import Tensor, nn

from axes.errors import AxesError, ShapeError, UnknownName
from axes.optim.engine.layouts import PLAIN, Layout, divided
from axes.optim.engine.routing import Role, Roles, named_roles, roles

Key = str | type[nn.Module]
Named = list[tuple[str | None, Tensor]]
QKV = Literal["whole", "split", "heads"]

_FUSED = frozenset({"c_attn", "qkv", "qkv_proj", "wqkv", "query_key_value"})  # layers that hold several projections
_BY_HEADS = frozenset({"query_key_value"})  # whose rows are ordered by heads, in each queries, keys and values
_WRAPPED = re.compile(r"(^|(?<=\.))(_orig_mod|module|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_FEW = 3  # names that a message gives before it counts


class _Place(NamedTuple):
    """Where a parameter is: its names, and the modules around it, the nearest first."""

    names: tuple[str, ...]
    around: tuple[nn.Module, ...] = ()

    def meets(self, key: Key) -> bool:
        if isinstance(key, str):
            return any(fnmatchcase(name, key) for name in self.names)
        return any(isinstance(module, key) for module in self.around)

    def distance(self, key: Key) -> int:
        """0 for its name, 1 for a pattern of names, 2 for a type of modules."""
        return 2 if not isinstance(key, str) else 1 - (key in self.names)

    def closest(self, keys: Iterable[Key]) -> Key | None:
        """The key that counts."""
        met = [key for key in keys if self.meets(key)]
        named = sorted((key for key in met if isinstance(key, str)), key=self.distance)
        if named:
            return named[0]
        return next((cls for module in self.around for cls in type(module).__mro__ if cls in met), None)


@final
class Router:
    """The roles of an optimizer's parameters, and what was said of them."""

    def __init__(self, who: str, names: Sequence[str], listens: bool, options: Mapping[str, Any]) -> None:
        """names: of the rules, the one for matrices first. listens: it reads the inputs of layers."""
        self.who, self.rules, self.listens = who, tuple(names), listens
        self.said: dict[Key, str] = _keys(who, "rules", options.get("rules"))
        shaped = _keys(who, "matrices", options.get("matrices"))
        self.shaped = {key: Layout.of(who, text) for key, text in shaped.items()}
        self.qkv: QKV = options.get("qkv") or "whole"
        if self.qkv not in ("whole", "split", "heads"):
            raise AxesError(f"{who}: qkv must be 'whole', 'split' or 'heads', got {self.qkv!r}")
        given = [name for name in ("rules", "matrices", "qkv") if options.get(name) not in (None, {}, "whole")]
        if given and not self.routes:
            raise AxesError(f"{who} has one rule, for parameters of any shape: leave out {given[0]}=")
        if listens and (self.shaped or self.qkv != "whole"):
            raise AxesError(f"{who} reads the inputs of layers, whose weights are one matrix: leave out {given[-1]}=")
        for rule in self.said.values():
            if rule not in self.rules:
                raise UnknownName(f"rule of {who}", str(rule), self.rules)
        self.roles: Roles = {}
        self.names: dict[Tensor, str] = {}
        self.modelled = False  # whether a model says what they are
        self._types: set[str] = set()  # names of those of its modules
        self.assumed = False  # whether the role of a parameter was read from its name alone
        self.settled = False  # whether all parameters of the construction are there
        self._idle: set[Key] = {*self.said, *self.shaped}  # keys that have moved nothing yet
        self._split = False
        self._sent = [0, 0]  # matrices and others that were told apart here
        self._unclear: dict[str, list[str]] = {}

    @property
    def routes(self) -> bool:
        """Whether there is more than one rule."""
        return len(self.rules) > 1

    # ---- what parameters are ---------------------------------------------------------------------------------

    def meet(self, model: nn.Module) -> None:
        """Take the roles of all parameters of a model."""
        modules = dict(model.named_modules(remove_duplicate=False))
        names: dict[Tensor, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        self.names.update({p: own[0] for p, own in names.items()})
        self.modelled = True
        self._types.update(type(module).__name__ for module in modules.values())
        if not self.routes:
            return
        known = roles(model, self.listens)
        for parameter, own in names.items():
            around = tuple(modules[path] for name in own for path in _paths(name))
            self.roles[parameter] = self._told(parameter, known[parameter], _Place(_variants(own), around))

    def assume(self, members: Named) -> None:
        """Take the roles of what is not known yet from names."""
        new = [(name, p) for name, p in members if name is not None and p not in self.roles]
        for (name, parameter), role in zip(new, named_roles(new).values(), strict=True):
            self.assumed = True
            self.names[parameter] = str(name)
            self.roles[parameter] = self._told(parameter, role, _Place(_variants([name])))

    def by_rule(self, members: Named) -> dict[str, Named]:
        """The parameters of each rule, the matrices being the first one's."""
        self.assume(members)
        routed: dict[str, Named] = {rule: [] for rule in self.rules}
        for name, parameter in members:
            role = self.roles.get(parameter)
            if role is None:
                raise AxesError(self._nameless(parameter))
            self._sent[not role.matrix] += 1
            if role.unclear and parameter.requires_grad and parameter.numel():
                self._unclear.setdefault(role.reason, []).append(name or self.names[parameter])
            routed[self.rules[not role.matrix]].append((name, parameter))
        return routed

    def named_by_group(self, rule: str, members: Named, matrices: str | Sequence[str] | None) -> None:
        """A group says the rule of its parameters, and perhaps how they are matrices, all alike or one by one."""
        self.assume(members)
        texts = [matrices] * len(members) if matrices is None or isinstance(matrices, str) else matrices
        for (name, parameter), text in zip(members, texts, strict=True):
            layout = self.roles[parameter].layout if parameter in self.roles else PLAIN
            if text is not None:
                said = Layout.of(self.who, text or "out ...")
                layout = said.fitted(f"{self.who}: {_called(name, parameter)}", parameter)
            self.roles[parameter] = Role(rule == self.rules[0], "named by its group", layout)

    def layout(self, parameter: Tensor) -> Layout:
        """How a parameter of the first rule is a matrix."""
        role = self.roles.get(parameter)
        return role.layout if role is not None and role.matrix else PLAIN

    # ---- when all are there ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """AxesError where a key moved nothing or no matrix was found; one warning about what is not known."""
        for key in (*self.said, *self.shaped):
            if key in self._idle:
                raise AxesError(self._moves_nothing(key))
        if self.qkv != "whole" and not self._split:
            raise AxesError(
                f"{self.who}: qkv={self.qkv!r} found no fused projection ({', '.join(sorted(_FUSED))}, in_proj of an "
                "attention): leave it out, or say which weights are several matrices, matrices={'name': '(3 out) in'}"
            )
        matrices, others = self._sent
        if self.routes and others and not matrices and not self._named_there():
            raise AxesError(self._no_matrix(others))
        self.warn()
        self.settled = True

    def warn(self) -> None:
        """Once: matrices that take the auxiliary rule because nobody knows what they are."""
        if not self._unclear:
            return
        main, auxiliary = self.rules[:2]
        count = sum(map(len, self._unclear.values()))
        first = next(iter(self._unclear.values()))[0]
        warnings.warn(
            f"{self.who}: {count} matrix-shaped parameter{'s' * (count > 1)} will take {auxiliary!r}: "
            f"{self._grouped(self._unclear)}. Hidden matrices are said by rules={{{first!r}: {main!r}}} (a name, a "
            f"pattern of names or a type of modules), and rules={{{first!r}: {auxiliary!r}}} says that this is meant",
            UserWarning,
            stacklevel=5,
        )
        self._unclear = {}

    def _named_there(self) -> bool:
        return any(role.matrix for role in self.roles.values() if role.reason == "named by its group")

    # ---- what was said ---------------------------------------------------------------------------------------

    def _told(self, parameter: Tensor, role: Role, place: _Place) -> Role:
        """The role of a parameter after what was said of it."""
        who = f"{self.who}: {place.names[0]!r}"
        key, shaped = place.closest(self.said), place.closest(self.shaped)
        if key is not None and shaped is not None and self.said[key] != self.rules[0]:  # whichever is closer
            if place.distance(key) == place.distance(shaped):
                raise AxesError(
                    f"{who}: rules ({_text(key)}) gives it {self.said[key]!r}, and matrices ({_text(shaped)}) says "
                    "how it is a matrix: leave one of them out"
                )
            key, shaped = (None, shaped) if place.distance(key) > place.distance(shaped) else (key, None)
        rule = None if key is None else self.said[key]
        if shaped is not None:
            if parameter.ndim > 1 or shaped in place.names:  # a pattern means the matrices that it matches
                layout = self.shaped[shaped].fitted(who, parameter)
                self._idle -= {k for k in self.shaped if place.meets(k)}
                role = Role(True, f"said by matrices ({_text(shaped)})", layout)
        elif role.matrix and self.qkv != "whole" and (parts := self._parts(parameter, role.layout, place)):
            self._split = True
            role = role._replace(layout=divided(role.layout, parts))
        if key is None:
            return role
        if rule != self.rules[0]:
            self._idle -= {k for k in self.said if place.meets(k)}
            return Role(False, f"said by rules ({_text(key)})")
        if not _is_matrix(parameter, role.layout) or role.entrywise:
            if key in place.names:
                raise ShapeError(f"{who} has shape {tuple(parameter.shape)}, and {rule!r} is for matrices")
            return role
        if self.listens and not role.listened:
            raise AxesError(f"{who} cannot take {rule!r}, which reads the inputs of nn.Linear and Conv1D only")
        if parameter.ndim > 2 and not role.known:
            raise AxesError(
                f"{who} has shape {tuple(parameter.shape)}: say which dimensions are a matrix, for example "
                f"matrices={{{place.names[0]!r}: 'experts out in'}} (a batch of matrices) or 'out ...' (one)"
            )
        self._idle -= {k for k in self.said if place.meets(k)}
        return Role(True, f"said by rules ({_text(key)})", role.layout, listened=role.listened)

    def _parts(self, parameter: Tensor, layout: Layout, place: _Place) -> int:
        """The number of matrices in a fused projection of an attention; 0 if it is none."""
        name = place.names[0].lower()
        *path, last = [word for word in name.split(".") if not word.isdigit()]
        layer = path[-1] if path and last == "weight" else ""
        inside = layer == "in_proj" and any("att" in word for word in path)
        if not (layer in _FUSED or inside or last == "in_proj_weight"):
            return 0
        rows, columns = layout.shape(parameter)[-2:]
        who = f"{self.who}: {place.names[0]!r} is {rows} x {columns}"
        if self.qkv == "heads":
            size = next((d for module in place.around if (d := _head_size(module))), 0)
            if not size or rows % size:
                raise AxesError(
                    f"{who}, and no head_dim around it divides its rows: say the number of heads, queries', keys' and "
                    f"values' together: matrices={{{place.names[0]!r}: '({rows // 64 or 12} out) in'}}"
                )
            return rows // size
        if layer in _BY_HEADS or rows not in (2 * columns, 3 * columns):
            why = "its rows are ordered by heads" if layer in _BY_HEADS else "not two or three times its columns"
            raise AxesError(f"{who}, {why}: it is no row of equal matrices; qkv='heads' takes it head by head")
        return rows // columns

    # ---- messages --------------------------------------------------------------------------------------------

    def _nameless(self, parameter: Tensor) -> str:
        main, auxiliary = self.rules[:2]
        if self.modelled:
            return (
                f"{self.who}: a parameter of shape {tuple(parameter.shape)} is not in the model that was given: pass "
                "the model that holds it, its name beside it, or a group that names its rule, such as "
                f"{{'params': ..., 'rule': {main!r}}}"
            )
        return (
            f"{self.who} treats hidden matrices and other parameters differently and cannot tell them apart by shape: "
            "pass the model or its named_parameters(), or model= beside parameters or groups without names (in the "
            f"Trainer of transformers optimizer_cls_and_kwargs=({self.who}, {{'model': model, ...}})), or groups that "
            f"name their rule, such as {{'params': ..., 'rule': {main!r}}} and rule {auxiliary!r}"
        )

    def _moves_nothing(self, key: Key) -> str:
        option = "rules" if key in self.said else "matrices"
        who = f"{self.who}: {option}={{{_text(key)}: ...}}"
        if not isinstance(key, str):
            return f"{who} matches nothing" if self.modelled else f"{who} is a type of modules: pass the model, model="
        known = list(self.names.values())
        if key in self._types:
            return f"{who} is the name of a type of modules: write the type itself, {option}={{{key}: ...}}"
        if not known:
            return f"{who} is a name, and no parameter has one: pass the model, model= or named_parameters()"
        what = "matches no matrix" if self._main(key) else "matches no parameter"
        near = get_close_matches(key, known, n=2, cutoff=0.3)
        return f"{who} {what}; names are such as {_several(near or known)}"

    def _main(self, key: Key) -> bool:
        return key in self.shaped or self.said[key] == self.rules[0]

    def _no_matrix(self, others: int) -> str:
        main, auxiliary = self.rules[:2]
        why: dict[str, list[str]] = {}
        for parameter, role in self.roles.items():
            why.setdefault(role.reason, []).append(self.names.get(parameter, "a parameter"))
        return (
            f"{self.who} found no matrix for rule {main!r} among {others} parameters, so that all would take "
            f"{auxiliary!r}: {self._grouped(why)}. Say which are hidden matrices, rules={{'pattern of names': "
            f"{main!r}}} or rules={{TypeOfModules: {main!r}}}, or take the optimizer of {auxiliary!r}"
        )

    def _grouped(self, names: Mapping[str, list[str]]) -> str:
        return "; ".join(f"{_several(some)} ({reason})" for reason, some in names.items())


def _keys(who: str, option: str, given: Any) -> dict[Key, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise AxesError(f"{who}: {option} maps names, patterns of names or types of modules, got {given!r}")
    for key, value in given.items():
        if not (isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module))):
            raise AxesError(f"{who}: a key of {option} is a pattern of names or a type of modules, got {key!r}")
        if not isinstance(value, str):
            raise AxesError(f"{who}: {option} maps {_text(key)} to {value!r}, which is no text")
    return dict(given)


def _paths(name: str) -> list[str]:
    """The modules around a parameter, the nearest first: h.0.attn, h.0, h and the root of h.0.attn.weight."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:i]) for i in range(len(parts), -1, -1)]


def _variants(names: Iterable[str]) -> tuple[str, ...]:
    """Names, and as they are without the wrappers of compilers, processes and checkpointing."""
    return tuple(dict.fromkeys(x for name in names for x in (name, _WRAPPED.sub("", name))))


def _is_matrix(parameter: Tensor, layout: Layout) -> bool:
    return parameter.ndim > 1 and min(layout.shape(parameter)[-2:]) > 1


def _head_size(module: nn.Module) -> int:
    for name in ("head_dim", "head_size"):
        size = getattr(module, name, None)
        if isinstance(size, int):
            return size
    return 0


def _text(key: Key) -> str:
    return repr(key) if isinstance(key, str) else key.__name__


def _called(name: str | None, parameter: Tensor) -> str:
    return repr(name) if name else f"a parameter of shape {tuple(parameter.shape)}"


def _several(names: list[str]) -> str:
    """A few names and a count."""
    shown = ", ".join(map(repr, names[:_FEW]))
    return shown if len(names) <= _FEW else f"{shown} and {len(names) - _FEW} more"


__all__ = ["QKV", "Key", "Named", "Router"]
