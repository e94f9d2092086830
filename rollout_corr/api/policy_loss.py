"""The policy loss: value, statistics and gradient in one forward; backward only scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypedDict, overload

import torch
from torch import Tensor

from ..backends import loss_blocks, loss_operators, operators, whole
from ..backends.batch import OpenBatch
from ..backends.choose import BackendName
from ..backends.differentiable import Differentiable, refuse_other_derivatives
from ..backends.given import Batch, Factors, batch_given
from ..backends.layouts import L, L_co, LogProbs, W_co, described
from ..backends.loss_blocks import finite_tokens
from ..backends.loss_task import LossTask
from ..backends.ranks import THIS_RANK
from ..backends.read import Given, check_mask
from ..backends.run import Corrected, count_padded, mask_back, run_correction
from ..definition.entropy import total_of
from ..definition.loss import both
from ..metrics import loss as loss_metrics
from ..metrics.statistics import HasStatistics, Statistics
from ..specs.checked import known_keywords
from ..specs.correction import Spec
from ..specs.loss import Loss, no_loss
from ..specs.operands import LossResult
from ..specs.surrogate import Decided
from ..specs.surrogates import without_ratio
from ..specs.terms import KL, EntropyBonus, Mean, Objective
from .correct import Correction, spec_given
from .loss_request import USES, LossRequest, read_request

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, eq=False)
class PolicyLoss(HasStatistics, Generic[L_co, W_co]):
    """The result of `policy_loss`; its type names the layout and the weights, as `Correction` does.

    Attributes:
        value: 0-d, fp32 (fp64 where any log-prob is); the only one with a gradient: to `new_logp`, and by an entropy
            bonus to `Batch.entropy`.
        mask: Non-zero at trained tokens: dtype and shape of the mask given. With `correction=` of the same mask it
            is the correction's own tensor, where nothing was written to either of them since. Where the kernels
            corrected in the pass of the loss, mask and weights are made when one of them is first read, from the same
            inputs; RuntimeError where one of these was written to since.
        weights: The correction's weights where a Spec was given, as in `Correction`, else None. The mode decides how
            they enter the loss.
        keep: [S] bool where a Spec was given, else None: False for sequences that it rejected as a whole.
        statistics: Mergeable statistics on the device: the correction's where a Spec was given, then the loss's.
        keep_turns: [U] bool where a Spec and `Batch.turns` were given, else None, as in `Correction`.
    """

    value: Tensor
    mask: L_co
    weights: W_co
    keep: Tensor | None
    statistics: Statistics
    keep_turns: Tensor | None = None
    _remarks: tuple[str, ...] = ()
    _total: Tensor | None = None

    if not TYPE_CHECKING:  # a checker shall go on refusing every unknown name

        def __getattr__(self, name: str) -> object:
            """Name `.value` to whoever takes this for the loss itself."""
            hint = ""
            if name in ("backward", "item", "detach", "grad_fn"):
                hint = f"; the loss is its .value: write .value.{name}" + ("()" if name != "grad_fn" else "")
            raise AttributeError(f"'PolicyLoss' object has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        """Shapes and dtypes, and on the CPU the value; nothing is read from a device."""
        # What a whole step makes when somebody asks is not made for this.
        made = {name: described(vars(self)[name]) for name in ("mask", "weights", "keep") if name in vars(self)}
        found = ", ".join(f"{name}={made.get(name, '(not made yet)')}" for name in ("mask", "weights", "keep"))
        plain = self.value.device.type == "cpu" and type(self.value) is Tensor and not torch.compiler.is_compiling()
        value = f"{self.value.item():.6g}" if plain else described(self.value)
        return f"PolicyLoss(value={value}, {found}, device='{self.value.device}')"

    def warnings(self) -> list[str]:
        """Say in plain words what is wrong with the call, and which metrics deserve a look."""
        said = [*self._remarks]
        # A count of 0 divides by 1, so that a batch in which no rank has a token has a loss of 0.
        if self._total is not None and float(self._total) == 0.0 and (count := self.metrics()["tokens_trained"]):
            said.append(f"total is 0 and {count:.0f} tokens train: their losses are added up and not divided")
        return [*said, *super().warnings()]


UNCORRECTED = (
    "rollout_logp is not used: next to old_logp the ratio is new/old, and without correction= or spec= nothing "
    "corrects the mismatch. Pass correction=rc.correct(old_logp, rollout_logp, batch, spec=...) or spec=...; "
    "leave out old_logp for bypass mode, or rollout_logp where nothing is to be corrected"
)
WITHOUT_GRADIENT = (
    "new_logp requires no gradient, so value.backward() raises: it was detached, or computed under torch.no_grad() or "
    "inference_mode()"
)


class LossOptions(TypedDict, total=False):
    """The arguments of `policy_loss` that the type of its result does not depend on."""

    mask: LogProbs | None
    cu_seqlens: Tensor | None
    old_logp: LogProbs | None
    rollout_logp: LogProbs | None
    ref_logp: LogProbs | None
    correction: Correction | Factors | None
    backend: BackendName


@overload
def policy_loss(
    new_logp: L,
    advantages: LogProbs,
    batch: Batch | None = None,
    loss: Loss = ...,
    *,
    spec: Spec,
    **more: Unpack[LossOptions],
) -> PolicyLoss[L, L]: ...
@overload
def policy_loss(
    new_logp: L,
    advantages: LogProbs,
    batch: Batch | None = None,
    loss: Loss = ...,
    *,
    spec: None = None,
    **more: Unpack[LossOptions],
) -> PolicyLoss[L, None]: ...
@known_keywords
def policy_loss(
    new_logp: LogProbs,
    advantages: LogProbs,
    batch: Batch | None = None,
    loss: Loss = Loss(),  # noqa: B008  (frozen)
    *,
    mask: LogProbs | None = None,
    cu_seqlens: Tensor | None = None,
    old_logp: LogProbs | None = None,
    rollout_logp: LogProbs | None = None,
    ref_logp: LogProbs | None = None,
    correction: Correction | Factors | None = None,
    spec: Spec | None = None,
    backend: BackendName = "auto",
) -> PolicyLoss:
    """The policy loss of a batch, ready for `out.value.backward()`.

    The log-probs that are given decide the mode. *Decoupled*: `old_logp` is given, the ratio is new/old, and weights
    enter once, as constants: from `correction`, or from a `spec` and `rollout_logp`. *Bypass*: only `rollout_logp` is
    given; the ratio is new/rollout and is itself the correction. There a Spec rejects, and its weight is reported;
    Score and DPPO take it in place of their ratio; GPG and DRO, which have none, are multiplied by it. *On-policy*:
    neither is given, and the ratio is 1 with a gradient. `Surrogate.of` overrules.

    Args:
        new_logp: Log-probs under the policy being trained, fp32, bf16, fp16 or fp64, in any layout of `correct`. The
            gradient goes to these alone, and to `Batch.entropy` where a bonus is asked for.
        advantages: Per token (same layout) or per sequence ([S] or [S, 1]).
        batch: Everything else about the tokens: the `Batch` that `correct` had. Its mask is non-zero at
            generated tokens. What neither the loss nor the Spec needs is not read. The kept mass is a constant in the
            gradient and part of every ratio to rollout_logp; in new/old it would cancel.
        loss: Surrogate, mean, KL, regularizer and entropy bonus, as `Loss`; the mean of PPO() over tokens by default.
        mask: Short for `Batch(mask=...)`: non-zero at generated tokens; None: every token.
        cu_seqlens: The offsets of packed sequences, short for `Batch(cu_seqlens=...)`: [S + 1] int32 or int64.
        old_logp: Log-probs under the proximal policy, same layout.
        rollout_logp: Log-probs under the engine that sampled the tokens, same layout. Next to `old_logp` only a `spec`
            and surrogates of new/rollout read them: without these nothing is corrected, as `warnings()` says.
        ref_logp: Log-probs under the reference policy, same layout; needed by `Loss.kl`.
        correction: What `correct` returned: its weights multiply the surrogate, and its mask says what trains. Or
            `Factors`, weights and a mask from elsewhere.
        spec: In its place, correct in the same call, from old/rollout, or from new/rollout in bypass mode; with most
            Specs the kernels do so in the one pass over the tokens that the loss takes (docs/kernels.md). Criteria
            with of="new/rollout" and of="new/old" work here.
        backend: "auto", "triton" or "torch". An explicit choice never falls back.

    Returns:
        A `PolicyLoss`. Its gradient is computed already; backward multiplies it. It is exactly 0 at every token that
        does not train, except for terms with scope="all".

    Raises:
        ValueError: A wrong shape, dtype, device, length or name, or arguments that exclude each other.
        TypeError: An argument of the wrong type.
    """
    tokens = batch_given(batch, mask, cu_seqlens)
    if not isinstance(loss, Loss):
        raise tokens.told(no_loss(loss))
    of = None if spec is None else spec_given(spec, tokens, "a Spec or None")
    given = Given(
        new_logp, rollout_logp, tokens, of, advantages, backend, None, loss, old_logp, ref_logp, correction
    )  # fmt: skip
    ranks, validate = tokens.ranks, tokens.validate
    if ranks is not THIS_RANK:
        ranks.check()
    claimed = None
    try:
        request = read_request(given)
        if validate:
            check_mask(request.task)
            if ranks.some():
                claimed = request.claims()
    except (TypeError, ValueError) as error:
        if validate:
            ranks.tell(error)
        raise
    if claimed is not None:
        ranks.compare(claimed)
    return _run(request)


# --- running it ---

# The functions of the runners, by the names of `choose.RUNNERS`.
LOSSES: dict[str, Callable[[LossTask], LossResult]] = {
    "split": loss_blocks.run_split,
    "kernels": loss_operators.run_fused,
    "operator": loss_blocks.run_traced,
    "traced": loss_blocks.run_traced,
    "blocks": loss_blocks.run_blocks,
    "whole": loss_blocks.run_whole,
}


def _run(request: LossRequest) -> PolicyLoss:
    """Correct where a Spec is given, run the loss, and put the result in the caller's layout."""
    task, given, of_call = request.task, request.given, request.task.objective
    ranks, total = given.batch.ranks, task.divisor
    refuse_other_derivatives(task.leaf)
    remarks = () if task.leaf.requires_grad else (WITHOUT_GRADIENT,)
    inner = None
    if request.corrects is not None:
        if _is_one_pass(request, request.corrects):
            return _run_step(request, request.corrects, remarks)
        task, inner = _correct_inside(request, request.corrects)
    if of_call.surrogate.sees_batch:
        decided = _decided_by_batch(request, task)
        of_tokens = of_call.surrogate.traits.sees == "batch" and decided.tokens
        task = replace(task, decided=decided, chosen=decided.tokens[0] if of_tokens else None)
    count = _count(request, of_call, total)
    if count is not total:
        task = replace(task, divisor=count)
    kl = of_call.kl
    if kl is None or kl.mean is None:
        if inner is not None and task.decided is None and ranks.batch is None and request.runner == "kernels":
            task = replace(task, before=(inner[1].vector, inner[1].sums.shape[0]))
        value, found = _reduced(request, task)
    else:
        value, found = _reduced(request, replace(task, objective=replace(of_call, kl=None)))
        penalty, apart = _reduced(request, _penalty_apart(request, task, kl, kl.mean))
        vector = loss_metrics.with_kl_of(found.statistics, apart.statistics, of_call)
        value, found = value + penalty, found._replace(statistics=vector)
    statistics = Statistics(None, found.statistics, of_call)
    if request.entropy is not None:
        if given.loss.entropy_bonus is not None:
            value = value + bonus_of(request, given.loss.entropy_bonus, task, found.divisor).to(value.dtype)
        if inner is None:
            from ..backends.extras import statistics_of_entropy

            tokens = request.entropy.detach().to(task.dtype), task.new.to(task.dtype)
            statistics = statistics_of_entropy(*tokens, task, ranks).join(statistics)
    if inner is None:
        mask = mask_back(task, _within(task, task.trains)) if request.joined is None else request.joined
        unused = request.logps["rollout_logp"] is not None and task.weights is None and task.trains is None
        if unused and request.mode == "decoupled":
            remarks = (UNCORRECTED, *remarks)
        return PolicyLoss(value, mask, None, None, statistics, None, remarks, total)
    made, corrected = inner
    handed = None if made.weights is None else task.restore(made.weights)
    if found.joined:
        statistics = replace(corrected, vector=found.statistics, objective=of_call)
    else:
        statistics = corrected.join(statistics)
    mask = mask_back(task, task.trains)
    return PolicyLoss(value, mask, handed, made.keep, statistics, made.keep_turns, remarks, total)


def _count(request: LossRequest, wanted: Objective, count: Tensor | None) -> Tensor | None:
    """Return the divisor of a loss, 0-d float64, if it is known before the loss runs; None: the loss counts."""
    groups, task = request.given.batch.ranks, request.task
    of_turns = wanted.surrogate.mean_unit == "turn"
    if wanted.mean.over == "rows" and (request.runner != "kernels" or groups.batch is not None or of_turns):
        # Kernels know how many rows a call has that is alone.
        return groups.sum(torch.full((), task.count, dtype=torch.float64, device=task.new.device))
    return count


def _reduced(request: LossRequest, task: LossTask) -> tuple[Tensor, LossResult]:
    """Run a loss: the value, which has the gradient, and the result."""
    groups, wanted = request.given.batch.ranks, task.objective
    result = LOSSES[request.runner](task)
    if task.divisor is None and groups.batch is not None and wanted.mean.of != "sum":
        result = loss_blocks.divided_by(result, groups.sum(loss_blocks.counted(result.statistics, wanted)), wanted)
    if not groups.first():
        result.statistics[: len(loss_metrics.OF_SEQUENCES)] = 0.0
    return _with_gradient(task, result), result


def _with_gradient(task: LossTask, result: LossResult) -> Tensor:
    """Give the value of a loss its gradient to new_logp, if it has one."""
    if result.gradient is None:
        return result.value
    # Autograd takes its time for every argument.
    more: tuple[Tensor | None, ...] = ()
    if result.inners is not None or result.flags is not None:
        offsets = task.offsets
        if offsets is not None and not torch.compiler.is_compiling() and offsets.is_inference():
            offsets = offsets.clone()  # autograd saves no tensor of inference mode
        more = result.inners, offsets, result.flags
    given = result.value, result.gradient, result.rest, result.by_kernels, *more
    value: Tensor = Differentiable.apply(task.leaf, *given)
    return value


# --- the correction in the pass of the loss ---


class _WholeStep(PolicyLoss[L_co, W_co]):
    """The result of a correction and a loss in one pass, whose weights and mask are made when somebody asks."""

    _settle: Callable[[], tuple[Any, Any]]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Make the weights and the mask."""
            if name not in ("weights", "mask") or "_settle" not in vars(self):
                return super().__getattr__(name)
            self.__dict__["weights"], self.__dict__["mask"] = self._settle()
            del self.__dict__["_settle"]
            return vars(self)[name]

    def __reduce__(self) -> Any:
        """Copy or pickle it with its weights and its mask."""
        return PolicyLoss, tuple([getattr(self, each.name) for each in fields(PolicyLoss)])


def _is_one_pass(request: LossRequest, batch: OpenBatch) -> bool:
    """Return whether the kernels run the correction in the pass of the loss."""
    if request.runner != "kernels" or torch.compiler.is_compiling():
        return False
    from ..backends import step

    ranks, run = request.given.batch.ranks, request.runs
    assert run is not None
    alone = ranks.batch is None and ranks.sequence is None and request.entropy is None
    of_kernels = operators.beyond_kernels(run) is None
    reason = step.two_calls(run, request.task.objective)
    return alone and of_kernels and reason is None and step.fits(request.task, batch)


def _run_step(request: LossRequest, batch: OpenBatch, remarks: tuple[str, ...]) -> PolicyLoss:
    """Run the correction in the pass of the loss."""
    from ..backends import step

    task, spec, run = request.task, request.spec, request.runs
    assert spec is not None and run is not None
    found = step.run_step(task, batch, run, request.use, spec.rejected)
    statistics = Statistics(spec, found.statistics, task.objective)
    if batch.mask is None and batch.offsets is None:
        statistics = count_padded(statistics, batch, spec)

    unsettled = step.Unsettled(batch, run, "new_logp" if batch.train is task.new else "old_logp")
    all_train = request.use == "report" and spec.rejected == "zero"

    # The request stays out of it: it has tensors of the loss alone, and new_logp with its history.
    def settled() -> tuple[Any, Any]:
        weights, mask = unsettled.make()
        return None if weights is None else batch.restore(weights), mask_back(batch, None if all_train else mask)

    made = object.__new__(_WholeStep)
    made.__dict__.update(
        value=_with_gradient(task, found),
        keep=found.keep,
        statistics=statistics,
        keep_turns=None,
        _settle=settled,
        _remarks=remarks,
        _total=task.divisor,
    )
    return made


def _penalty_apart(request: LossRequest, task: LossTask, kl: KL, mean: Mean) -> LossTask:
    """Make the loss of a KL with a mean of its own: of the same tokens, and with a policy loss of 0."""
    wanted = Objective(
        without_ratio(task.objective.surrogate.clamp),
        replace(kl, mean=None),
        mean=mean,
        nonfinite=task.objective.nonfinite,
    )
    # A product, so that an advantage that is not finite leaves its token out here too.
    advantages, divisor = task.advantages * 0.0, _count(request, wanted, None)
    # Turns and chosen tokens are the surrogate's: where there are turns, the kernels take each for a sequence.
    return replace(
        task, objective=wanted, advantages=advantages, divisor=divisor, turns=None, decided=None, chosen=None
    )


def _decided_by_batch(request: LossRequest, task: LossTask) -> Decided:
    """Let the surrogate of a call decide from the whole batch."""
    ids, groups = request.ids, request.given.batch.ranks
    if task.objective.surrogate.traits.sees == "groups":
        return loss_blocks.see_groups(task, groups)
    if ids is None:
        ids = torch.arange(task.count, device=task.new.device) + (groups.rank() << 32)
    return loss_blocks.see_batch(task, ids, groups)


def _within(task: LossTask, train_mask: Tensor | None) -> Tensor | None:
    """Set the mask given to 0 where a ready training mask is 0; None without one."""
    if train_mask is None:
        return None
    if task.mask is None:
        kept, inside = train_mask != 0, whole.inside_some(task)
        return kept if inside is None else kept & inside
    if not task.mask.is_floating_point():
        # Half of the time of `where` on a CPU; a product of floats would keep NaN.
        return task.mask * train_mask.bool()
    return torch.where(train_mask != 0, task.mask, 0).to(task.mask.dtype)


def _correct_inside(request: LossRequest, batch: OpenBatch) -> tuple[LossTask, Corrected]:
    """Correct in the same call; statistics are under the caller's Spec, whose criteria have the same labels."""
    spec, run = request.spec, request.runs
    assert spec is not None and run is not None
    found, statistics = run_correction(batch, run, request.runs_on, request.given.batch.ranks)
    factors, trains = found.weights, found.mask
    if not USES[request.use].multiply:
        factors = None if spec.rejected == "mask" else trains
        if factors is not None and factors.dtype != torch.bool:
            factors = factors != 0
        trains = None if spec.rejected == "zero" else trains
    return replace(request.task, weights=factors, trains=trains), (found, replace(statistics, spec=spec))


def bonus_of(request: LossRequest, bonus: EntropyBonus, task: LossTask, divisor: Tensor) -> Tensor:
    """0-d float64: the term of the loss, of this rank's tokens, with its gradient to the caller's entropy.

    A token that the loss leaves out does not train; the policy loss gives the divisor.
    """
    objective = request.task.objective
    assert request.entropy is not None
    entropy = request.entropy.to(task.dtype)
    if task.scales is not None:
        entropy = entropy * torch.where(task.scales.isfinite(), task.scales, 0.0)
    kept = both(None if task.trains is None else task.trains != 0, finite_tokens(task))
    if request.given.batch.ranks.sequence is None or not objective.mean.averages:
        sequences, valid = whole.sequences_of(task)
        total = total_of(entropy, valid, kept, bonus.scope, sequences, objective)
    else:
        split, valid = whole.split_sequences_of(task, request.given.batch.ranks.sequence)
        with torch.no_grad():
            total_of(entropy, valid, kept, bonus.scope, split, objective)
        split.start("policy_loss: the tokens of each sequence")
        split.wait()
        total = total_of(entropy, valid, kept, bonus.scope, split, objective)
    return -bonus.coef * (total / divisor.detach())
