"""slime's and miles's flags, and what goes wrong with them."""

from __future__ import annotations

from ..shared.checking import Checks, Rule, Run, without
from ..shared.run_files import ReadAsText
from .config import FLAGS, MIS

PATH, CONFIG = "custom_tis_function_path", "custom_config_path"
OURS = tuple(
    key for key in FLAGS if "tis" in key or "opsm" in key or key in ("use_rollout_logprobs", "get_mismatch_metrics")
)


def _is_text(key: str) -> Rule:
    """A number in mis.yaml that YAML 1.1 has read as text."""
    message = "YAML 1.1, which slime reads it as, takes a number with an exponent and no point for text"
    fix = "write a decimal point before the e, as in 1.0e-4"
    return Rule(key, lambda run: isinstance(run.get(key), ReadAsText), message, fix)


def _uses_mis(run: Run) -> bool:
    return "mis" in str(run.get(PATH, ""))


CHECKS = Checks(
    keys=(*OURS, *MIS, CONFIG),
    alike=("custom_loss_function_path", "custom_agent_function_path"),
    roles={"length": "rollout_max_response_len"},
    uses_logprobs=lambda run: run.corrects or run.is_("use_rollout_logprobs", True),
    bounds={
        "weight": ("tis_upper_bound", "tis_clip", "tis_lower_bound", "tis_level", "use_tis"),
        "tis_mask": ("tis_upper_bound", "tis_lower_bound"),
        "rs": ("rs_upper_bound", "rs_lower_bound", "tis_upper_bound", "rs_level"),
        "criteria": ("tis_clip", "tis_clip_low"),
    },
    rules=(
        *without("use_tis", "tis_clip", "tis_clip_low"),
        *without("use_opsm", "opsm_delta"),
        Rule(
            PATH,
            lambda run: run.has(PATH) and run.off("use_tis") and run.off("get_mismatch_metrics") and run.off(CONFIG),
            "{value} is not called without --use-tis",
            "add --use-tis",
        ),
        Rule(
            CONFIG,
            lambda run: str(run.get(CONFIG)).endswith("mis.yaml") and run.off(PATH),
            "{value} has the settings of a function that is not called: slime's own TIS reads --tis-clip alone",
            "add --custom-tis-function-path ...mis.compute_mis_weights_with_cp",
        ),
        Rule(
            "get_mismatch_metrics",
            lambda run: run.is_("get_mismatch_metrics", True) and run.off(PATH),
            "slime refuses it without a function",
            "add --custom-tis-function-path",
        ),
        Rule(
            "tis_clip",
            lambda run: _uses_mis(run) and run.has("tis_clip"),
            "{value} does nothing: the function of mis.yaml reads tis_upper_bound",
            "write tis_upper_bound in mis.yaml",
        ),
        *(_is_text(key) for key in MIS if key.endswith(("bound", "threshold"))),
    ),
)
