"""AReaL's settings that make the correction, and what goes wrong with them."""

from __future__ import annotations

from ..shared.checking import Checks, roles, without
from .config import REJECTION, TABLE

REJECTS, DECOUPLED = "actor.rejection_sampling", "actor.use_decoupled_loss"
M2, SAPO = "actor.m2_threshold", "actor.use_sapo_loss"
UPPER = f"{REJECTS}.upper"

CHECKS = Checks(
    keys=(*(f"actor.{name}" for name in TABLE), *(f"{REJECTS}.{name}" for name in REJECTION)),
    alike=("sapo_tau",),
    closed=(REJECTS,),
    launchers=r"\bareal\.(infra\.)?launcher\.",
    roles=roles("gconfig.", "temperature", trainer_temperature="actor.temperature", length="gconfig.max_new_tokens"),
    bounds={"weight": (UPPER, f"{REJECTS}.lower"), "criteria": (UPPER, f"{REJECTS}.lower")},
    # SAPO refuses the decoupled loss: what its configuration should leave out the reader says.
    rules=without(DECOUPLED, UPPER, M2, default=False, unless=lambda run: run.is_(SAPO, True)),
)
