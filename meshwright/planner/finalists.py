"""The layouts that `plan` shows and a run chooses from, by one rule: the search, priced again, and what is allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from meshwright.errors import NoRoomError, PlanError
from meshwright.planner.candidate import Candidate, Choice, sort_candidates
from meshwright.planner.choose import choose
from meshwright.planner.compilation import compiled_question, consider_compiled, may_compile
from meshwright.planner.expert_exchange import consider_exchange
from meshwright.planner.islands import candidate_join, choose_islands, fixed_islands
from meshwright.planner.lossy import consider_lossy, lossy_hint, no_lossy_note
from meshwright.planner.measured_price import Measure, measure_activations, price_layout, reprice_choice
from meshwright.planner.question import Question
from meshwright.planner.round_choice import SLACK, choose_rounds
from meshwright.planner.rounds import Rounds
from meshwright.planner.secondary import consider_secondary
from meshwright.planner.tp_overlap import consider_overlap
from meshwright.planner.unequal import choose_unequal
from meshwright.spec.axis import Holds
from meshwright.spec.groups import round_axes, row_axes
from meshwright.spec.layout import Layout
from meshwright.units import format_seconds

LEAST_TRIED = 4
"""Layouts that are priced compiled at least: the fastest without may be one that can't be compiled."""


def choose_finalists(question: Question, show: int, measure: Measure | None, allow: Collection[str] = ()) -> Choice:
    """Returns the fastest layouts that fit, the plan first.

    Args:
        question: what is planned.
        show: most layouts in the answer.
        measure: returns the model's operators; None where only its sizes are known.
        allow: of `spec.plan.ALLOWED`.

    Raises:
        PlanError: when no layout fits.
    """

    def price(layout: Layout) -> Candidate:
        return price_layout(question, layout, measure)

    islands, lossy = fixed_islands(question), "lossy" in allow
    if islands is not None:
        choice = reprice_choice(question, choose_islands(question, islands, show), measure)
        choice = _with_notes(choice, _join_note(question, choice.best[0]))
        return _with_notes(choice, no_lossy_note("islands")) if lossy else choice
    if not question.cluster.uniform:
        choice = choose_unequal(question, show)
        notes = [no_lossy_note("devices that differ")] if lossy else []
        if "islands" in allow:
            notes.append(
                "--allow islands changes nothing here: islands aren't searched for devices that differ; nearest that "
                "works: a site for each kind, by --outer.meet"
            )
        return _with_notes(choice, *notes)
    choice = (
        _search_compiled_too(question, show, measure) if may_compile(question) else _search(question, show, measure)
    )
    if lossy:
        choice = consider_lossy(question, choice, price)
    elif hint := lossy_hint(question, choice.best[0], price):
        choice = _with_notes(choice, hint)
    return consider_islands(question, choice, show, measure, lossy) if "islands" in allow else choice


def _search_compiled_too(question: Question, show: int, measure: Measure | None) -> Choice:
    """Returns the best of two searches, of layouts as they are and of compiled ones."""
    tried, compiled = max(show, LEAST_TRIED), compiled_question(question)
    if measure is not None:
        compiled = measure_activations(compiled, measure)
    compiled_choice, refusal = None, None
    # What is fastest compiled needn't be among the best without: less element-wise work leaves more for traffic.
    try:
        compiled_choice = _search(compiled, tried, measure)
    except PlanError as error:  # nothing fits compiled
        refusal = error
    try:
        choice = _search(question, tried, measure)
    except NoRoomError:
        # Compiled layers keep less for backward, so theirs is the least shortage.
        if isinstance(refusal, NoRoomError):
            raise refusal from None
        if compiled_choice is None:
            raise
        note = "compile=true: no layout fits without, since compiled layers keep less for backward"
        choice = _with_notes(compiled_choice, note)
    else:
        choice = consider_compiled(
            question, choice, compiled_choice, lambda layout: price_layout(question, layout, measure)
        )
    return dataclasses.replace(choice, best=choice.best[:show]) if show < tried else choice


def _search(question: Question, show: int, measure: Measure | None) -> Choice:
    """Returns the best of the search, priced again by the measured work of the model's modules, and their forms."""

    def price(layout: Layout) -> Candidate:
        return price_layout(question, layout, measure)

    choice = reprice_choice(question, choose(question, show), measure)
    for consider in (consider_secondary, consider_overlap, consider_exchange):
        choice = consider(question, choice, price)
    return choice


def consider_islands(
    question: Question, choice: Choice, show: int, measure: Measure | None, lossy: bool = False
) -> Choice:
    """Returns the choice, which islands lead where they are faster: the fewest that are about as fast as any number.

    Args:
        question: what was planned, without fixed islands.
        choice: of layouts without islands.
        show: most layouts of each number of islands.
        measure: as in `choose_finalists`.
        lossy: whether movements may travel rounded where the user didn't say.
    """
    island_plans: list[Candidate] = []
    axis, copies = round_axes()[0], row_axes(Holds.COPY)[0]
    for count in _island_counts(question):
        islands = Layout(degrees={axis: count, copies: question.cluster.devices // count})
        try:
            best = reprice_choice(question, choose_islands(question, islands, show), measure).best
        except PlanError:  # rows that they don't divide, or no room for the outer weights
            continue
        rounds = choose_rounds(question, best[0], lossy)
        joining = dataclasses.replace(question, rounds=rounds)
        island_plans.append(best[0] if rounds == question.rounds else price_layout(joining, best[0].layout, measure))
    if not island_plans:
        return choice
    fastest, without = min(island_plans, key=lambda candidate: candidate.price.step_s), choice.best[0]
    fastest_s = fastest.price.step_s
    if fastest_s * (1 + max(question.tie_tolerance, SLACK)) >= without.price.step_s:
        seconds, plan_s = format_seconds(fastest_s), format_seconds(without.price.step_s)
        sentence = f"--allow islands changes nothing here: {fastest.layout} takes {seconds} a step, the plan {plan_s}"
        return _with_notes(choice, sentence)
    plan = next(candidate for candidate in island_plans if candidate.price.step_s <= fastest_s * (1 + SLACK))
    best, ties = sort_candidates([plan, *choice.best], 0.0)
    rounds = plan.rounds or question.rounds
    sentence = (
        f"{plan.layout.islands} islands join once in {rounds.steps} steps{_chosen_settings(rounds)}, as --allow "
        f"islands permits; the fastest layout without, {without.layout}, takes "
        f"{format_seconds(without.price.step_s)} a step"
    )
    choice = dataclasses.replace(choice, best=best[: max(show, 1)], ties=ties)
    return _with_notes(choice, sentence, _join_note(question, plan))


def _chosen_settings(rounds: Rounds) -> str:
    """Returns in brackets the settings that a plan chose; empty without any."""
    words = [f"--outer.{name} {value}" for name, value in rounds.settings.items() if name in rounds.free]
    return f" ({' '.join(words)}, chosen here)" if words else ""


def _island_counts(question: Question) -> Iterator[int]:
    """Yields numbers of islands of whole nodes, or of devices where there is one node, the fewest first."""
    devices = question.cluster.devices
    most_islands = max(1, devices // question.machine.fabric.devices)
    if most_islands == 1:
        most_islands = devices
    yield from (count for count in range(2, most_islands + 1) if most_islands % count == 0)


def _join_note(question: Question, candidate: Candidate) -> str:
    joins = candidate_join(question, candidate)
    # Without islands that a user fixed, settings that would be better were chosen already.
    advises = fixed_islands(question) is not None or not question.rounds.free
    return joins.note(candidate.price.step_s - joins.step_s, advises)


def _with_notes(choice: Choice, *sentences: str) -> Choice:
    return dataclasses.replace(choice, notes=(*choice.notes, *sentences))
