"""What a configuration means for who leads its run."""

from __future__ import annotations

import math

from shoal.client.client import Beginning, run_rules
from shoal.config import Config
from shoal.wire.messages.base import StepRange


def test_a_client_gives_servers_that_compile_more_time() -> None:
    flow = {"stages": 2, "compile": True, "compile_timeout_s": 50.0}
    patient = Config.model_validate({"model_pipeline": flow, "network": {"bootstrap_timeout_s": 3.0}})
    assert run_rules(patient, Beginning(4)).servers_timeout_s == 53.0
    plain = Config.model_validate({"model_pipeline": {"stages": 2}, "network": {"bootstrap_timeout_s": 3.0}})
    assert run_rules(plain, Beginning(4)).servers_timeout_s == 3.0


def test_a_run_that_has_to_be_repeatable_has_no_deadline() -> None:
    config = Config.model_validate({"run": {"deterministic": True, "first_deadline_s": 12.5}})
    assert run_rules(config, Beginning(0)).first_deadline_s == math.inf
    config = Config.model_validate({"run": {"deterministic": False, "first_deadline_s": 12.5}})
    assert run_rules(config, Beginning(0)).first_deadline_s == 12.5


def test_the_steps_of_a_round_are_those_after_the_round_before() -> None:
    config = Config.model_validate({"diloco": {"inner_steps": 5, "outer_steps": 3}})
    rules = run_rules(config, Beginning(2, succeeds=True, patient=True))
    assert (rules.steps_of(2), rules.num_rounds, rules.total_steps) == (StepRange(5, 10), 3, 15)
    assert (rules.expected_servers, rules.succeeds, rules.patient) == (2, True, True)
