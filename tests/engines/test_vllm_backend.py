"""vLLM's own weight-transfer interface with `backend="weightlift"`, both ends, with a model whose experts transformers keeps fused."""

from collections.abc import Iterator

import pytest

from engine_crew import Engine, Refused, make_moe

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = 0.15
"""Nats. A token whose two best experts are near ties may be routed otherwise in bfloat16."""
PROMPTS = [[3, 14, 15, 92, 65, 35], [27, 18, 28, 18]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("moe")
    make_moe(folder, seed=7)  # other weights than the trainer's
    engine = Engine(folder, weight_transfer_config={"backend": "weightlift"})
    engine.ask("trainer_init", folder=str(tmp_path_factory.mktemp("trainer")))
    yield engine
    engine.close()


def test_it_starts_with_other_weights(engine: Engine) -> None:
    """The twin of the next test."""
    assert engine.ask("gap", prompts=PROMPTS)["gap"] > 5 * TOLERANCE


def test_three_rounds_reach_the_fused_experts(engine: Engine) -> None:
    for number in range(3):
        engine.ask("send", stir=0.05)
        found = engine.ask("gap", prompts=PROMPTS)
        assert found["gap"] < TOLERANCE
        assert found["versions"] == [[[str(number), 0, 8]]] * 2


def test_a_source_that_raises_is_an_error_on_both_sides_and_the_next_round_heals(engine: Engine) -> None:
    engine.ask("break_source", at=5)
    with pytest.raises(Refused) as caught:
        engine.ask("send")
    assert caught.value.kind == "SourceError"
    assert "the gather failed" in caught.value.message
    engine.ask("send", stir=0.05)
    assert engine.ask("gap", prompts=PROMPTS)["gap"] < TOLERANCE
