"""What a sharded trainer publishes is what the unsharded one holds, whatever the wrapping; and it leaves the trainer as it was."""

import pytest
import torch

from trainer_crew import reference, stage, train_step

pytestmark = pytest.mark.multiprocess

TWO = [
    "fsdp2",
    "fsdp2:whole",
    "fsdp2:shard1",
    "fsdp2:mixed",
    "fsdp2:ignored",
    "fsdp2:checkpoint",
    "fsdp2:compile",
    "fsdp1",
    "fsdp1:flat",
    "fsdp1:nested",
    "fsdp1:grad_op",
    "fsdp1:no_shard",
    "fsdp1:ignored",
    "fsdp1:checkpoint",
    "ddp",
    "ddp:compile",
]
FOUR = ["fsdp2", "fsdp2:hsdp", "fsdp2:tp", "fsdp1", "fsdp1:hybrid"]


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in TWO), *((kind, 4) for kind in FOUR)])
def test_the_engine_gets_what_the_unsharded_model_holds(kind: str, size: int) -> None:
    tied = not kind.endswith((":tp", ":nested"))
    with stage(kind, size, tied=tied) as (ranks, (engine,), model, optimiser):
        exact = kind not in ("fsdp2:mixed", "fsdp2:tp")
        for version in (1, 2, 3):
            if version == 2:
                ranks.ask("step")
                train_step(model, optimiser)
            if version == 3:  # a root that stays whole after a forward pass without a backward
                ranks.ask("eval")
                with torch.no_grad():
                    model(torch.zeros(2, 11, dtype=torch.int64))
            before = ranks.ask("digest")
            engine.pull()
            answers = ranks.ask("publish", version=version)
            assert [answer.get("version") for answer in answers] == [version] * size, answers
            assert not isinstance(engine.join(), Exception), engine.outcome
            want = reference(model)
            if kind.endswith(":checkpoint"):  # its second forward pass counts, too
                want |= {name: engine.held[name] for name in want if name.endswith(".calls")}
            if exact or version == 1:
                tolerance = {} if version == 1 else {"rtol": 1e-5, "atol": 1e-6}
                torch.testing.assert_close(engine.held, want, **(tolerance or {"rtol": 0, "atol": 0}))
            assert ranks.ask("digest") == before, "the sync changed the trainer"
        ranks.end()
