"""Training: steps, and between them evaluation, checkpoints and records."""

import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.config import Config
from tilewise.data.featurecache import cached_features, fingerprint, key_of
from tilewise.data.loader import Batches, load, moved
from tilewise.data.order import Order
from tilewise.data.samples import Source
from tilewise.data.sources import open_source
from tilewise.errors import DataError
from tilewise.evaluate import plots
from tilewise.evaluate.report import metrics_table, save_metrics
from tilewise.evaluate.suite import Suite
from tilewise.models.base import PairModel, evaluating
from tilewise.ranks import Ranks
from tilewise.train import checkpoint, logs, runfolder
from tilewise.train.build import make_model, model_of, train_view
from tilewise.train.checkpoint import Snapshot
from tilewise.train.checks import (
    check_alike,
    check_fields,
    check_norms,
    check_ranks,
    check_temperature,
)
from tilewise.train.objective import check_negatives
from tilewise.train.resuming import find, resume
from tilewise.train.saving import save
from tilewise.train.screen import Screen, counted, short
from tilewise.train.setup import start
from tilewise.train.stepping import Stepper, autocast
from tilewise.train.stopping import Stop, Stopped

RESULTS = "metrics.json"  # there once a run is done and evaluated

FEW = 1000  # samples below which the share of damaged ones says nothing


@dataclass
class Outcome:
    """What a run came to."""

    folder: Path
    steps: int
    metrics: dict[str, float]
    signal: int = 0
    """That has stopped it; 0 if it is done."""


def train(config: Config) -> Outcome:
    """Train as configured, evaluate, save; all ranks call it."""
    ranks = start(config.run.device, config.run.timeout_s)
    with Stop() as stop:
        outcome = Trainer(config, ranks, stop).run()
    ranks.stop()
    return outcome


class Trainer:
    """One run on one rank."""

    def __init__(self, config: Config, ranks: Ranks, stop: Stop | None = None) -> None:
        self.config, self.ranks, self.stop = config, ranks, stop or Stop()
        self.screen = Screen(shown=ranks.is_first)
        # What can be wrong is found before anything is written.
        data = config.data
        loading = (data.workers, data.index_folder)
        self.suite = Suite(config.eval, *loading, ranks, self._part, self.screen.say)
        source = open_source(data.train_data, index_folder=data.index_folder or None)
        check_fields(config)
        check_temperature(config.loss)
        check_ranks(config, ranks)
        ranks.ask_first(lambda: logs.check_reporters(config.run.report_to))
        self.first_step = self.saved = 0
        self.log = logs.Log(None)
        self.held: IO[str] | None = None
        try:
            self._make(source)
        except BaseException:
            self.close()
            raise

    def _make(self, source: Source) -> None:
        """All that trains. The folder of a run that goes on is held before its checkpoint is
        chosen, which another would go on from, or remove; a new one is made last.
        """
        config, ranks, data = self.config, self.ranks, self.config.data
        ranks.ask_first(self._hold_former)
        shot = find(config, ranks, self.screen.say, num_samples=len(source))
        self.model: PairModel = self._made(shot).to(ranks.device)
        self.suite.check(self.model)
        check_norms(config, self.model)
        self.source = self._cached(source) if data.feature_cache else source
        self.batches = self._batches()
        self._check_sample()
        self.stepper = Stepper(config, ranks, self.model, self.stop)
        epochs = config.run.epochs * len(self.source) / config.step.batch_size
        self.steps = config.run.steps or max(1, int(epochs))
        self.folder: Path = ranks.ask_first(self._take_folder)
        self._begin(shot)

    def _cached(self, source: Source) -> Source:
        """With the features of the locked tower, which the first rank computes if need be."""
        config, model, device = self.config, self.model, self.ranks.device
        form = model.form(model.view())
        facts = (config.model.model, config.step.precision, fingerprint(source, form))
        key = key_of(*facts, *model.frozen_state())
        path = Path(config.data.feature_cache) / f"{key}.npy"

        def embed(pixels: NDArray[np.uint8]) -> Tensor:
            inputs = {"image": torch.from_numpy(pixels).to(device)}
            with autocast(config, device), evaluating(model):
                return model.precompute(inputs)["image"]

        def tell(done: int, total: int) -> None:
            self.screen.part("embedding with the locked tower", done, total)
            self.ranks.tell(True)  # it may take longer than ranks wait for each other

        how: dict[str, Any] = {"form": form, "batch": config.eval.eval_batch}

        def compute() -> bool:
            with self.screen:
                cached_features(source, path, embed, on_progress=tell, **how)
            return False

        while self.ranks.ask_first(compute):  # the others hear how far it is, and what it refuses
            pass
        return cached_features(source, path, embed, **how)

    def _batches(self) -> Batches:
        data, ranks = self.config.data, self.ranks
        return Batches(
            source=self.source,
            form=self.model.form(train_view(data, self.model)),
            order=Order(len(self.source), self.config.run.seed, data.shuffle_window),
            size=self.config.step.batch_size,
            rank=ranks.rank,
            world=ranks.world,
            workers=data.workers,
            pin=ranks.device.type == "cuda",
        )

    def _check_sample(self) -> None:
        """One sample goes through: what is wrong with all of them is found before training."""
        config, form = self.config, self.batches.form
        inputs = load(self.source, form, [0], np.zeros((1, form.chances))).inputs
        try:
            with torch.no_grad(), autocast(config, self.ranks.device), evaluating(self.model):
                out = self.model(**self.model.precompute(moved(inputs, self.ranks.device)))
                check_alike(*(out[name].shape[1] for name in ("rows", "cols")))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            shapes = ", ".join(f"{name} {tuple(x.shape[1:])}" for name, x in inputs.items())
            raise DataError(
                f"samples of {config.data.train_data!r} do not go through the model "
                f"({shapes}): {error}"
            ) from error
        check_negatives(config, "negatives" in out)

    def _hold_former(self) -> None:
        """The folder of a run that goes on, if it is there; on the first rank."""
        former = runfolder.former(self.config.run)
        if former is not None:
            self.held = runfolder.hold(former)

    def _take_folder(self) -> Path:
        """The run's, which no other can have now; on the first rank."""
        folder = runfolder.make(self.config)
        self.held = self.held or runfolder.hold(folder)
        checkpoint.sweep(folder / "checkpoints")
        return folder

    def _begin(self, shot: Snapshot | None) -> None:
        """With all that a checkpoint has to go on from, and records of what is run."""
        run, ranks = self.config.run, self.ranks
        if run.resume:
            self.first_step = self.saved = resume(self.stepper, self.folder, shot, self.screen.say)
        if ranks.is_first:
            runfolder.describe(self.folder, self.config, step=self.first_step)
            runfolder.describe_machine(self.folder, ranks.device, ranks.world)
        ranks.ask_first(self._open_log)

    def _open_log(self) -> None:
        """On the first rank."""
        about = asdict(self.config)
        self.log = logs.Log(
            self.folder, self.config.run.report_to, since=self.first_step, about=about
        )

    def _made(self, shot: Snapshot | None) -> PairModel:
        """The model, as the run begins or goes on: features of a locked tower depend on it."""
        if shot is None:
            return make_model(self.config)
        return model_of(self.config, shot, average=False)

    def close(self) -> None:
        """Write what is left of the records, and let others have the folder."""
        self.log.close()
        if self.held is not None:
            runfolder.give_back(Path(self.held.name).parent)
            self.held.close()

    def run(self) -> Outcome:
        """All steps that are left."""
        try:
            self.screen.say(self._headline())
            left = self.first_step < self.steps
            if not left and self.ranks.tell((self.folder / RESULTS).exists()):
                at = f"{self.folder} is at step {self.first_step} already"
                self.screen.say(f"{at}; nothing is left to do")
                return Outcome(self.folder, self.first_step, {})
            self.model.train()
            self.stop.begun = True
            with self.screen:
                step, metrics = self._train() if left else self._evaluate_again()
            if self.ranks.is_first and not self.stop.heard:
                self._finish(metrics)
            return Outcome(self.folder, step, metrics, self.stop.heard)
        finally:
            self.close()

    def _train(self) -> tuple[int, dict[str, float]]:
        """The last step, and metrics after it."""
        if self.ranks.is_first:
            (self.folder / RESULTS).unlink(missing_ok=True)  # of fewer steps, if the run goes on
        metrics: dict[str, float] = {}
        self.screen.step(self.first_step, self.steps, {})
        for step, numbers in self._steps():
            self.screen.step(step, self.steps, numbers)
            if step % self.config.run.log_every == 0 or step == self.steps:
                self.log.add(step, **numbers)
            if not self.stop.heard:
                metrics = self._now_and_then(step) or metrics
            if self.stop.heard:
                self._halt(step)
                break
        return step, metrics

    def _evaluate_again(self) -> tuple[int, dict[str, float]]:
        """A run that was stopped after its last step."""
        metrics = self._evaluate(self.first_step, last=True)
        if self.stop.heard:
            self._halt(self.first_step)
        return self.first_step, metrics

    def _halt(self, step: int) -> None:
        """Save where the run is, unless that is done, and say how it goes on."""
        if step != self.saved:
            self._save(step)
        why = signal.Signals(self.stop.heard).name
        place = self.folder / "checkpoints" / f"step-{step:08d}"
        config = shlex.quote(str(self.folder / runfolder.CONFIG))
        self.screen.say(
            f"stopped by {why} after step {step} of {self.steps}, saved as {place}; "
            f"go on with: tilewise train {config} --resume latest"
        )

    def _headline(self) -> str:
        parameters = list(self.model.parameters())
        weights = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        batch, world = self.config.step.batch_size, self.ranks.world
        return (
            f"{self.config.model.model}: {short(weights)} parameters, {short(trained)} to train; "
            f"{counted(len(self.source), 'sample')}; {counted(self.steps, 'step')} of "
            f"{counted(batch, 'pair')} on {world} x {self.ranks.device.type}; to {self.folder}"
        )

    def _steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Steps taken, counted from 1, with their numbers."""
        batches = self.batches.since(self.first_step)
        begun, size = time.perf_counter(), self.config.step.batch_size
        for step in range(self.first_step, self.steps):
            started = time.perf_counter()
            batch = next(batches)
            self._check_bad(step)
            waited = time.perf_counter() - started
            numbers = self.stepper.step(step, self.steps, batch)
            now = time.perf_counter()
            each = (now - begun) / (step + 1 - self.first_step)
            yield (
                step + 1,
                {
                    **numbers,
                    "data_s": waited,
                    "step_s": now - started,
                    "pairs_per_s": size / (now - started),
                    "memory_mib": logs.memory_mib(self.ranks.device),
                    "eta_s": (self.steps - step - 1) * each,
                },
            )

    def _check_bad(self, step: int) -> None:
        bad = sum(self.batches.bad.values())
        seen = (step - self.first_step + 1) * self.batches.local_size()
        most = self.config.data.max_bad_share
        if bad > most * max(seen, FEW):
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.batches.bad.most_common())
            raise DataError(
                f"{bad} of {seen} samples were damaged ({kinds}), more than max_bad_share = "
                f"{most}; repair the data, or raise it"
            )

    def _now_and_then(self, step: int) -> dict[str, float]:
        """Save and evaluate, when it is time; in this order, so that nothing trained is lost."""
        run, last = self.config.run, step == self.steps
        if last or (run.save_every and step % run.save_every == 0):
            self._save(step)
        if last or (run.eval_every and step % run.eval_every == 0):
            return self._evaluate(step, last=last)
        return {}

    def _evaluate(self, step: int, *, last: bool) -> dict[str, float]:
        """Metrics; none if the run is stopped before all are there."""
        folder = self.folder if last and self.ranks.is_first else None
        ema = self.stepper.ema
        try:
            with ema.in_place() if ema is not None else nullcontext(), self.stepper.autocast():
                return self.suite.run(self.model, folder, whole=last)
        except Stopped:
            return {}
        finally:  # an error takes nothing with it that was measured before
            self.log.add(step, **self.suite.metrics)
            if folder is not None:
                self._draw(self.suite.metrics)

    def _part(self, what: str, done: int, total: int) -> None:
        """Of an evaluation, which may take long: all ranks are here equally often, and agree."""
        self.screen.part(what, done, total)
        self.stop.agree(self.ranks)
        if self.stop.heard:
            raise Stopped(self.stop.heard, f"while {what}")

    def _save(self, step: int) -> None:
        num_samples = len(self.source)
        save(self.stepper, self.folder / "checkpoints", step, num_samples=num_samples)
        self.saved = step

    def _draw(self, metrics: dict[str, float]) -> None:
        rows = self.log.rows()
        path = self.folder / "loss.png"
        plots.plot_curves(
            path, {"loss": _curve(rows, "loss")}, title="training loss", ylabel="loss"
        )
        recalls = {
            name: _curve(rows, name)
            for name in metrics
            if name.endswith(("_R@1", "_R@10", "/R@1", "/R@10"))
        }
        if recalls:
            path = self.folder / "recall.png"
            plots.plot_curves(path, recalls, title="recall", ylabel="share of queries")

    def _finish(self, metrics: dict[str, float]) -> None:
        save_metrics(self.folder / RESULTS, metrics)
        if metrics:
            self.screen.say(metrics_table(metrics))
        if self.stepper.skipped:
            lost = f"{self.stepper.skipped} of {counted(self.steps, 'step')}"
            self.screen.say(f"skipped, their loss or gradient not being finite: {lost}")
        if self.batches.bad:
            self.screen.say(f"damaged samples that others stood in for: {dict(self.batches.bad)}")
        self.screen.say(f"saved to {self.folder}: checkpoints, metrics.json, metrics.jsonl, *.png")


def _curve(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """A number by step, where there is one: what was not finite is None in the log."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]
