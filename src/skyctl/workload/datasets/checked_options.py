"""The meaning of ``--data`` with records, checked as far as the first records tell. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skyctl.errors import WorkloadError
from skyctl.workload.datasets.line_conversion import first_lines
from skyctl.workload.datasets.record_files import RecordOptions, find_record_files
from skyctl.workload.datasets.record_kinds import BadRecordError, kind_of, parse_record, read_source

_FIRST_RECORDS = 100
_CHECKED_FILES = 100


@dataclass(frozen=True)
class RecordChoices:
    """The user's choices of how records are used.

    Attributes:
        packing: None: nothing, so samples are packed.
        train_on_inputs, skip_bad: as in ``RecordOptions``.
    """

    packing: bool | None = None
    train_on_inputs: bool = False
    skip_bad: bool = False

    @classmethod
    def of(cls, options: RecordOptions) -> RecordChoices:
        """The user's choices from which ``find_record_options`` makes these options."""
        return cls(options.packing, options.train_on_inputs, options.skip_bad)

    def words(self) -> list[str]:
        """The command-line arguments that make these choices, as ``["--no-packing"]``."""
        words = [] if self.packing is None else ["--packing" if self.packing else "--no-packing"]
        words += ["--train-on-inputs"] if self.train_on_inputs else []
        return [*words, "--skip-bad"] if self.skip_bad else words

    def refuse_without_records(self, data: str | None, kind: str) -> None:
        """Raises WorkloadError where one was made and ``--data`` names no records for a ``hf:`` model."""
        if not (words := self.words()):
            return
        what = f"--data {data} is none" if data is not None else "--data names none"
        raise WorkloadError(
            f"{words[0]} is for records that a model of hf: is fine-tuned on, and "
            f"{what if kind == 'hf' else f'the workload is of another kind ({kind})'}",
            hint="records are in .jsonl, .json, .csv or .parquet files: hf:DIR --data chats.jsonl",
        )


def find_record_options(data: Path, choices: RecordChoices) -> RecordOptions:
    """How the records of a file or folder are used; their kind is that of the first one.

    Raises:
        WorkloadError: a file can't be read, or one of its first records is bad and not to be left out.
    """
    skip_bad = choices.skip_bad
    options: RecordOptions | None = None
    fault: WorkloadError | None = None
    for number, path in enumerate(find_record_files(data)[:_CHECKED_FILES]):
        for place, line in first_lines(data, path, 1 if number and not skip_bad else _FIRST_RECORDS):
            try:
                record = parse_record(line)
                if options is None:
                    options = RecordOptions(
                        kind_of(record), choices.packing is not False, choices.train_on_inputs, skip_bad
                    )
                read_source(record, options.kind)
            except BadRecordError as exc:
                fault = WorkloadError(f"{place}: {exc.what}", hint=exc.hint)
                if not skip_bad:
                    raise fault from exc
    if options is None:
        assert fault is not None  # there are files, and each has a record
        raise fault
    return options
