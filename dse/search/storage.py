"""Durable storage of a study's trials: a journal file, SQLite or PostgreSQL, written once a batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse.errors import DseError, StorageError, StudyError
from dse.search import checkpoint as checkpoints
from dse.search.checkpoint import Checkpoint, cannot_write
from perfcore.errors import MissingPackageError

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage
    from optuna.storages.journal import BaseJournalBackend
    from optuna.trial import FrozenTrial

logger = logging.getLogger(__name__)

JOURNAL = "study.journal"


class Existing(StrEnum):
    """What a new driver does with a study of its name."""

    GO_ON = "go_on"
    REFUSE = "refuse"
    REPLACE = "replace"


class StudyStorage:
    """Trials in an Optuna storage, the driver's state in a checkpoint beside them.

    The driver works on a study in memory; this is its durable copy. A batch may have been stored without its
    checkpoint (a kill between the two): the driver then repeats the batch, which gives the same trials,
    and only those that are missing are written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        name: str,
        objectives: Sequence[str],
        url: str | None = None,
        existing: Existing = Existing.GO_ON,
    ) -> None:
        """Open, or create, the study.

        Args:
            run_dir: folder of the run; holds the checkpoint, and the journal unless `url` names a database.
            name: the study's.
            objectives: names, in order; all minimised.
            url: `sqlite:///file`, `postgresql://…`, or a path to a journal file; `None`: `run_dir`'s journal.
            existing: what to do with a study of that name.

        Raises:
            StorageError: the place cannot be used, or the journal is corrupt.
            StudyError: there is a study of that name, to be refused.
        """
        self._checkpoint = run_dir / checkpoints.FILE
        self._backend: BaseJournalBackend | None = None
        self._where = url or str(run_dir / JOURNAL)
        with self._refusals():
            self._study = self._open(name, list(objectives), existing)

    def _open(self, name: str, objectives: list[str], existing: Existing) -> optuna.Study:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        storage = self._optuna_storage()
        if existing is not Existing.GO_ON and name in optuna.get_all_study_names(storage):
            if existing is Existing.REFUSE:
                raise StudyError(
                    f"{_without_password(self._where)} holds a study {name!r} already.",
                    hint="Go on with it by --resume, replace it by --overwrite, or give another --name.",
                )
            optuna.delete_study(study_name=name, storage=storage)
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            directions=["minimize"] * len(objectives),
            load_if_exists=True,
        )
        if study.user_attrs.get("objectives") != objectives:
            study.set_user_attr("objectives", objectives)
        return study

    def _optuna_storage(self) -> BaseStorage:
        if "://" in self._where:
            return _database(self._where)
        from optuna.storages import JournalStorage

        path = Path(self._where)
        repair_journal(path)
        self._backend = journal_backend(path)
        return JournalStorage(self._backend)

    def trials(self) -> list[FrozenTrial]:
        """All stored trials, by number."""
        with self._refusals():
            return self._study.get_trials(deepcopy=False)

    def checkpoint(self) -> Checkpoint | None:
        """The driver's state after the last finished batch."""
        return checkpoints.load(self._checkpoint)

    def append(self, trials: Sequence[FrozenTrial], *, first: int) -> None:
        """Store finished trials, the first of which has number `first`, in one write.

        Raises:
            StorageError: the place is full, read-only or gone.
        """
        with self._refusals():
            stored = len(self._study.get_trials(deepcopy=False))
            missing = trials[max(stored - first, 0) :]
            if self._backend is None:
                self._study.add_trials(missing)
            else:
                with self._backend.bulk():  # type: ignore[attr-defined] # of `journal_backend`
                    self._study.add_trials(missing)

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the driver's state."""
        checkpoints.save(checkpoint, self._checkpoint)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        from optuna.exceptions import StorageInternalError

        try:
            yield
        except DseError:
            raise
        except OSError as err:
            raise cannot_write(self._where, err) from err
        except (KeyError, AssertionError, TypeError, ValueError) as err:
            raise StorageError(
                f"{_without_password(self._where)} is not the journal of a study, or is corrupt: {err!r}.",
                hint="Restore it, name another --storage, or start again with --overwrite.",
            ) from err
        except StorageInternalError as err:
            raise StorageError(
                f"{_without_password(self._where)} refused: {err.__cause__ or err}.",
                hint="See that the database is up and writable; then go on with --resume.",
            ) from err


def _database(url: str) -> BaseStorage:
    import sqlalchemy.event
    import sqlalchemy.exc
    from optuna.storages import RDBStorage

    try:
        storage = RDBStorage(url)
        if storage.engine.dialect.name == "sqlite":
            sqlalchemy.event.listen(storage.engine, "connect", _write_ahead)
            storage.engine.dispose()  # connections opened from here on are told
        return storage
    except ImportError as err:
        raise MissingPackageError(
            f"{_without_password(url)} needs a driver that is not installed.",
            hint='pip install "psycopg[binary]" and write postgresql+psycopg://…',
        ) from err
    except (sqlalchemy.exc.SQLAlchemyError, RuntimeError) as err:
        raise StorageError(
            f"{_without_password(url)} cannot be opened: {str(err).splitlines()[0]}.",
            hint="A storage is sqlite:///file.db, postgresql://user@host/name, or a path to a journal file.",
        ) from err


def _write_ahead(connection: Any, _record: Any) -> None:
    """Optuna commits several times a trial: a write-ahead log survives a kill without a sync for each."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    scheme, sep, user = head.partition("://")
    return f"{scheme}{sep}{user.split(':')[0]}{at}{tail}"


def repair_journal(path: Path) -> None:
    """Cut off a last line that a kill or a full disk left torn.

    Raises:
        StorageError: a line in the middle is not JSON; the message names it.
    """
    # A run folder has one driver, so that whoever held the journal's own lock is dead.
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if not path.exists():
        return
    good = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not _is_record(line):
                if file.read(1):
                    raise StorageError(
                        f"{path}:{number}: the journal is corrupt: the line is not a JSON record.",
                        hint="Restore the file, or start again with --overwrite.",
                    )
                break
            good += len(line)
    if good < path.stat().st_size:
        logger.warning("%s: a torn last line was cut off", path)
        with path.open("r+b") as file:
            file.truncate(good)


def _is_record(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def journal_backend(path: Path) -> BaseJournalBackend:
    """Optuna's journal file with a `bulk()` context in which all records go to the disk in one write."""
    from optuna.storages.journal import BaseJournalBackend, JournalFileBackend

    class BulkFileBackend(BaseJournalBackend):
        def __init__(self) -> None:
            self._file = JournalFileBackend(str(path))
            self._held: list[dict[str, Any]] | None = None
            self._stored = sum(1 for _ in self._file.read_logs(0))

        def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
            if self._held is None:
                yield from self._file.read_logs(log_number_from)
            else:
                yield from self._held[max(log_number_from - self._stored, 0) :]

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            if self._held is None:
                self._file.append_logs(logs)
                self._stored += len(logs)
            else:
                self._held += logs

        @contextmanager
        def bulk(self) -> Iterator[None]:
            self._held = []
            try:
                yield
            finally:
                held, self._held = self._held, None
                if held:
                    self.append_logs(held)

    return BulkFileBackend()
