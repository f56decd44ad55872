"""Of cases that are much alike, those that `make test` runs; `make test-all` runs them all.

A test names such cases itself (`one_of_each`, `drawn`, `crossed`), and what a file's functions are parametrised with is
drawn from while the file is collected (`left_out`): of what is crossed, a cover in which every value of every parameter
occurs. What is drawn follows from the file and a seed (--draw-seed), so that it is the same in every run and process,
whichever of the tests are asked for.
"""

from __future__ import annotations

import functools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FEW = 4  # cases of a function that are never drawn from
# Where that keeps too much. Of a file: one in so many of its functions that have a value takes it, and at least one;
# functions of no more cases than FEW take all. Of a function: one in so many of its own values, which need not occur
# elsewhere; 1 where a case is the meaning itself, the oracle of every row.
SHARES = {
    "tests/axes/test_bench.py::test_every_rule_is_computed_alike_by_both_torch_routes": 2,
    "tests/axes/test_bench_optim.py": 3,
    "tests/axes/test_costs.py": 2,
    "tests/axes/test_derived.py": 3,
    "tests/axes/test_finite.py": 3,
    "tests/axes/test_finite.py::test_how_large_values_may_be": 1,
    "tests/axes/test_geometry.py": 2,
    "tests/axes/test_kernel_terms.py": 2,
    "tests/axes/test_kernel_terms.py::test_a_layer_by_its_kernel_is_one_graph_to_a_compiler": 2,
    "tests/axes/test_language_model.py": 3,
    "tests/axes/test_monoids.py": 2,
    "tests/axes/test_mutation_law.py": 3,
    "tests/axes/test_mutation_law.py::test_every_field_matters": 3,
    "tests/axes/test_mutation_law.py::test_every_field_of_the_catalogue_matters": 3,
    "tests/axes/test_reference.py::test_causality": 2,
    "tests/axes/test_routes.py": 3,
    "tests/axes/test_routes.py::test_a_route_is_the_interpreter": 1,
    "tests/axes/test_run_folder.py::test_a_broken_line_of_the_log_loses_that_line": 2,
    "tests/axes/test_state_update.py": 2,
    "tests/axes/test_training.py::test_every_system_trains_for_twenty_steps": 2,
    "tests/axes/test_what_runs.py": 3,
    "tests/axes/test_what_runs.py::test_an_optimizer_runs_what_is_said": 3,
    "tests/depth/test_modules.py": 3,
    "tests/depth/test_modules.py::test_compiled_and_checkpointed": 2,
    "tests/depth/test_networks.py::test_streams_part_within_fifty_steps": 2,
    "tests/optim/test_bad_optimizer_input.py": 3,
    "tests/optim/test_contract.py": 3,
    "tests/optim/test_entries.py": 2,
    "tests/optim/test_identities.py": 2,
    "tests/optim/test_loops.py": 2,
    "tests/optim/test_matrices.py": 2,
    "tests/optim/test_max_side.py::test_every_field_of_a_one_sided_tuple_matters": 2,
    "tests/optim/test_numbers.py": 3,
    "tests/optim/test_numbers.py::test_a_schedule_of_everything_traces_nothing_and_is_what_the_tuples_say": 3,
    "tests/sequence/test_common.py": 3,
    "tests/sequence/test_common.py::test_forward_is_the_recurrence": 1,
    "tests/sequence/test_common.py::test_the_reference_agrees_with_every_gradient": 1,
    "tests/sequence/test_compiled.py": 2,
    "tests/sequence/test_compiled.py::test_on_fake_tensors": 2,
    "tests/sequence/test_compiled.py::test_a_new_length_compiles_nothing": 2,
    "tests/sequence/test_compiled.py::test_exported_with_any_length": 3,
    "tests/sequence/test_miras.py": 2,
}

_Param = type(pytest.param(0))
Row = Sequence[Hashable]  # a case: its value of every parameter


def one_of_each(groups: Iterable[Sequence[Any]]) -> list[Any]:
    """One case of every group, each time at the next place among them; the others are slow."""
    made = []
    for n, group in enumerate(groups):
        for place, case in enumerate(map(_param, group)):
            slow = () if place == n % len(group) else (pytest.mark.slow,)
            made.append(pytest.param(*case.values, id=case.id, marks=(*case.marks, *slow)))
    return made


def drawn(cases: Iterable[Any], one_in: int) -> list[Any]:
    """One case of every `one_in` neighbours, of the last ones too where they are fewer. Those that are slow anyway
    are nobody's neighbours."""
    every = [_param(case) for case in cases]
    quick = [case for case in every if not _slow(case)]
    groups = [quick[i : i + one_in] for i in range(0, len(quick), one_in)]
    return [*one_of_each(groups), *filter(_slow, every)]


def crossed(cases: Iterable[Any], *ways: Iterable[Any]) -> list[Any]:
    """Every case (a pytest.param with an id) in all ways, of which one is drawn for each: the next one every time."""
    every = [(way, "-".join(str(x).removeprefix("torch.") for x in way)) for way in product(*ways)]
    return one_of_each(
        [pytest.param(*case.values, *way, id=f"{case.id}-{said}", marks=case.marks) for way, said in every]
        for case in cases
    )


# ---- while a file is collected ---------------------------------------------------------------------------------------


class Table(NamedTuple):
    """The cases of a function: what each has of every parameter, and of the argument with most values, which is of one
    of the parameters."""

    rows: Sequence[Row]
    values: Sequence[Hashable]
    column: int


@functools.cache
def seers() -> frozenset[str]:
    """Cases that were the first to see a planted fault (docs/mutants.json)."""
    report = json.loads((Path(__file__).resolve().parents[1] / "docs" / "mutants.json").read_text(encoding="utf-8"))
    return frozenset(found["by"] for found in report if found["outcome"] == "seen")


def left_out(
    items: Iterable[pytest.Item], seed: int, shares: Mapping[str, int] = SHARES, seeing: Set[str] | None = None
) -> list[pytest.Item]:
    """The items of a file, or of a class in it, that are not drawn; `seers` are kept, drawn or not. What is slow anyway
    stands for nobody, and what needs a GPU runs where there is one, all of it."""
    seeing = seers() if seeing is None else seeing
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not {"slow", "gpu"} & {mark.name for mark in item.iter_markers()}:
            functions[item.nodeid.partition("[")[0]].append(item)
    tables = {name: _table(cases) for name, cases in functions.items()}
    taken = own(tables, shares, seed)
    left = []
    for name, cases in functions.items():
        if name in taken or len(cases) > FEW and len(tables[name].rows[0]) > 1:
            kept = set(cover(tables[name], f"{seed} {name}", taken.get(name)))
            left += [case for n, case in enumerate(cases) if n not in kept and case.nodeid not in seeing]
    return left


def cover(table: Table, seed: str, taken: Set[Hashable] | None = None) -> list[int]:
    """Places of few rows in which every value of every column occurs; of three columns and more also every pair of
    values that a quarter of the rows has room for. Where few of the values of the longest argument are taken, what
    occurs in its column beside others is not asked for. Each time the row with most that is new, the first of these in
    an order by seed."""
    rows, column = table.rows, table.column
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    wanted = [n for n in order if taken is None or table.values[n] in taken]
    kept: list[int] = []
    for together in (1, 2) if len(rows[0]) > 2 else (1,):
        has = {n: set(combinations(enumerate(rows[n]), together)) for n in order}
        new = set[Any]().union(*(has[n] for n in wanted))
        if together == 1:
            new |= {((n, x),) for row in rows for n, x in enumerate(row) if n != column}
        new -= set[Any]().union(*(has[n] for n in kept))
        while new and (together == 1 or 4 * len(kept) < len(wanted)):
            best = max((*wanted, *order), key=lambda n: len(has[n] & new))
            kept.append(best)
            new -= has[best]
    return sorted(kept)


def own(tables: Mapping[str, Table], shares: Mapping[str, int], seed: int) -> dict[str, set[Hashable]]:
    """By function that has a share, the values of its longest argument that are its own. Of a file's functions that
    have a value one in so many takes it, and at least one; a function that is named itself shares with nobody."""
    groups: dict[str, dict[str, list[Hashable]]] = defaultdict(dict)
    for name, table in tables.items():
        said = next((x for x in (name, name.partition("::")[0]) if x in shares), None)
        if said is not None and (said == name or len(table.rows) > FEW):
            groups[said][name] = list(dict.fromkeys(table.values))
    taken: dict[str, set[Hashable]] = {}
    for said, functions in groups.items():
        have = Counter(x for values in functions.values() for x in values)
        ranks = {x: n for n, x in enumerate(random.Random(f"{seed} {said}").sample(list(have), len(have)))}
        turns = Counter[Hashable]()
        for name, values in functions.items():
            one_in = {x: shares[said] if said == name else min(shares[said], have[x]) for x in values}
            mine = {x for x in values if (ranks[x] + turns[x]) % one_in[x] == 0} or {values[0]}
            turns.update(values)
            if len(mine) < len(values):
                taken[name] = mine
    return taken


def _table(cases: Sequence[Any]) -> Table:
    """Names that are parametrised together are one parameter, unless their values are crossed: at least half of all
    combinations occur."""
    together = [_names(mark) for mark in cases[0].iter_markers("parametrize")]
    said = [name for names in together for name in names]
    together += [[name] for name in cases[0].callspec.params if name not in said]
    values = {name: [_value(case.callspec.params[name]) for case in cases] for name in cases[0].callspec.params}
    longest = max(values, key=lambda name: len(set(values[name])))
    columns: list[list[Hashable]] = []
    column = 0
    for names in together:
        apart = [values[name] for name in names if name in values]
        whole: list[Hashable] = list(zip(*apart, strict=True))
        crossed = 2 * len(set(whole)) >= prod(len(set(column)) for column in apart)
        if longest in names:
            column = len(columns) + (names.index(longest) if crossed else 0)
        columns += apart if crossed else [whole]
    return Table(list(zip(*columns, strict=True)), values[longest], column)


def _names(mark: pytest.Mark) -> list[str]:
    said = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [x.strip() for x in said.split(",") if x.strip()] if isinstance(said, str) else list(said)


def _value(x: Any) -> Hashable:
    """What two parameters that are the same have in common."""
    if isinstance(x, tuple | list):
        return type(x), *map(_value, x)
    if isinstance(x, dict):
        return dict, *((_value(key), _value(x[key])) for key in x)
    try:
        hash(x)
    except TypeError:
        return id(x)
    return type(x), x


def _param(case: Any) -> Any:
    return case if isinstance(case, _Param) else pytest.param(*(case if isinstance(case, tuple) else (case,)))


def _slow(case: Any) -> bool:
    return any(mark.name == "slow" for mark in case.marks)
