"""How a run saves where it is: all ranks together."""

import shutil
from dataclasses import asdict
from pathlib import Path

from tilewise.errors import CheckpointError
from tilewise.train import checkpoint, logs
from tilewise.train.stepping import Stepper


def save(stepper: Stepper, folder: Path, step: int, *, num_samples: int) -> None:
    """A checkpoint in the folder; or an error on all ranks, whichever failed, and nothing left.

    num_samples: of the data that the run trains on.
    """
    ranks, config, pool = stepper.ranks, stepper.config, stepper.objective.pool_state()
    shot = checkpoint.collect(stepper.model, stepper.optimizer)
    if stepper.ema is not None:
        shot.ema = checkpoint.ema_state(stepper.ema.average)
    draft: Path = ranks.ask_first(lambda: checkpoint.begin(folder, step))

    def own_pool() -> None:
        if pool is not None:
            checkpoint.write_pool(draft, ranks.rank, pool)

    def rest() -> None:
        shot.step, shot.samples = step, step * config.step.batch_size
        about = {"config": asdict(config), "stepper": stepper.state(), "num_samples": num_samples}
        shot.about = {"versions": logs.versions(), "model": stepper.model.facts(), **about}
        checkpoint.save(draft, shot)
        checkpoint.prune(folder, config.run.keep_checkpoints)

    try:
        ranks.ask_all(own_pool)
        ranks.ask_first(rest)
    except CheckpointError:
        shutil.rmtree(draft, ignore_errors=True)  # now that nobody writes to it any more
        raise
