"""Where tasks run: in this process, or on Ray actors, local or in a cluster."""

from __future__ import annotations

import logging
import os
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dse.errors import StudyError
from dse.search.protocol import Evaluator, EvaluatorFactory, Pool, Space, T, Task
from perfcore.errors import MissingPackageError

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
IN_FLIGHT_PER_WORKER = 3


@dataclass(frozen=True, slots=True)
class InProcessExecutor:
    """Runs tasks one after the other, in this process."""

    width: int = 1

    @contextmanager
    def start(self, space: Space, factory: EvaluatorFactory) -> Iterator[Pool]:
        """A pool of this process."""
        yield _InProcessPool(space, factory())


@dataclass(frozen=True, slots=True)
class _InProcessPool:
    space: Space
    evaluator: Evaluator

    def map(self, tasks: Iterable[Task[T]]) -> Iterator[T]:
        return (task(self.space, self.evaluator) for task in tasks)


@dataclass(frozen=True, slots=True)
class RayExecutor:
    """Runs tasks on Ray actors. The evaluator is built here, once, and copied to the actors.

    Attributes:
        width: actors.
        address: of a running cluster (`auto`, `ray://host:port`); `None` starts Ray on this machine.
    """

    width: int
    address: str | None = None

    def __post_init__(self) -> None:
        """Refuse an empty pool."""
        if self.width < 1:
            raise StudyError(f"`workers >= 1` must hold, but got {self.width}.")

    @contextmanager
    def start(self, space: Space, factory: EvaluatorFactory) -> Iterator[Pool]:
        """A pool of actors; Ray is shut down with the context if it was started here.

        Raises:
            MissingPackageError: Ray is not installed.
            StudyError: the cluster cannot be reached.
        """
        ray = _import_ray()
        evaluator = factory()
        owned = not ray.is_initialized()
        if owned:
            self._init(ray)
        pool = _RayPool(ray, space, evaluator, self.width)
        try:
            yield pool
        finally:
            pool.close()
            if owned:
                ray.shutdown()

    def _init(self, ray: Any) -> None:
        local = {} if self.address else {"num_cpus": self.width, "include_dashboard": False}
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR, **local)
        except (ConnectionError, ValueError, RuntimeError, OSError) as err:
            raise StudyError(
                f"Ray cannot be started at {self.address or 'this machine'}: {err}.",
                hint="Check the address, or leave --workers at 1.",
            ) from err


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would otherwise hide accelerators from actors that ask for none, and warn that this will change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as err:
        raise MissingPackageError("More than one worker needs Ray.", hint="pip install ray") from err
    return ray


class _Worker:
    """Lives in an actor: the space and the evaluator, and whatever task is asked."""

    def __init__(self, pickled: bytes) -> None:
        space_and_evaluator: tuple[Space, Evaluator] = pickle.loads(pickled)
        self._space, self._evaluator = space_and_evaluator

    def pid(self) -> int:
        return os.getpid()

    def run(self, task: Task[T]) -> T:
        return task(self._space, self._evaluator)


class _RayPool:
    """Keeps a few tasks in flight at each actor, replaces actors that die, and keeps the tasks' order."""

    def __init__(self, ray: Any, space: Space, evaluator: Evaluator, width: int) -> None:
        self._ray = ray
        self._actor = ray.remote(_Worker)
        # As bytes: arrays out of Ray's store are read-only, for which numba would compile everything again.
        self._pickled = ray.put(ray.cloudpickle.dumps((space, evaluator)))
        self._workers = [self._new() for _ in range(width)]

    def _new(self) -> Any:
        return self._actor.remote(self._pickled)

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return list(self._ray.get([worker.pid.remote() for worker in self._workers]))

    def close(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker)

    def map(self, tasks: Iterable[Task[T]]) -> Iterator[T]:
        flying: deque[tuple[Task[T], int, Any, Any]] = deque()
        width = len(self._workers)
        for number, task in enumerate(tasks):
            flying.append(self._submit(task, number % width))
            if len(flying) >= IN_FLIGHT_PER_WORKER * width:
                yield self._result(*flying.popleft())
        while flying:
            yield self._result(*flying.popleft())

    def _submit(self, task: Task[T], slot: int) -> tuple[Task[T], int, Any, Any]:
        worker = self._workers[slot]
        return task, slot, worker, worker.run.remote(task)

    def _result(self, task: Task[T], slot: int, worker: Any, reference: Any) -> T:
        errors = self._ray.exceptions
        for _ in range(MAX_DEATHS):
            try:
                result: T = self._ray.get(reference)
                return result
            except errors.RayTaskError as err:
                if isinstance(err.cause, Exception):
                    raise err.cause from None
                raise
            except errors.RayActorError:
                if self._workers[slot] is worker:
                    logger.warning("worker %d died and is replaced", slot)
                    self._workers[slot] = self._new()
                task, slot, worker, reference = self._submit(task, slot)
        raise StudyError(
            f"A worker died {MAX_DEATHS} times at the same chunk.",
            hint="It may have run out of memory: use fewer --workers.",
        )
