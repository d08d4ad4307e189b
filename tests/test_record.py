"""What a recorder writes can be tuned to; what it cannot write harms no request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import tiny
from click.testing import CliRunner

from shapeserve.cli import main
from shapeserve.config import Record, ServeConfig
from shapeserve.engine import record as record_module
from shapeserve.engine.record import Recorder
from shapeserve.errors import ConfigError
from shapeserve.metrics import Metrics
from shapeserve.traces import read_traffic


class Clock:
    def __init__(self, *times_s: float) -> None:
        self._times: Iterator[float] = iter(times_s)
        self.last = 1.8e9

    def __call__(self) -> float:
        self.last = next(self._times, self.last + 1.0)
        return self.last


def recorder(
    directory: Path, *times_s: float, max_bytes: int = 1 << 20, axes: tuple[str, ...] = ("seq",)
) -> Recorder:
    metrics = Metrics()
    metrics.preset("org/mini", ["batch=1,seq=8"], ["batch", *axes])
    settings = Record(path=str(directory), max_bytes=max_bytes)
    made = Recorder(settings, "org/mini", axes, metrics, clock=Clock(*times_s))
    made.metrics = metrics  # type: ignore[attr-defined]
    return made


def counted(made: Any, result: str) -> float:
    labels = {"model": "org/mini", "result": result}
    return float(
        made.metrics.registry.get_sample_value("shapeserve_recorded_rows_total", labels) or 0
    )


def test_times_and_sizes_are_written_and_nothing_else(tmp_path: Path) -> None:
    made = recorder(tmp_path, 1.8e9, 1.8e9 + 0.25, axes=("height", "width"))
    made.add([(480, 640), (64, 32)])
    made.flush()
    made.add([(1, 2)])
    made.close()
    made.flush()
    assert made.path.parent == tmp_path / "org_mini"
    lines = "t_s,height,width\n1800000000.000,480,640\n1800000000.000,64,32\n1800000000.250,1,2\n"
    assert made.path.read_text() == lines
    traffic = read_traffic(tmp_path / "org_mini")
    assert (traffic.axes, traffic.sizes.tolist()) == (
        ("height", "width"),
        [[480, 640], [64, 32], [1, 2]],
    )
    assert traffic.times_s is not None
    assert traffic.times_s.tolist() == [0.0, 0.0, 0.25]
    assert (counted(made, "written"), counted(made, "lost")) == (3, 0)


def test_without_rows_there_is_no_file(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.start()
    made.close()
    assert [*tmp_path.iterdir()] == []


def test_a_clock_that_is_set_back_leaves_a_trace_that_can_be_read(tmp_path: Path) -> None:
    made = recorder(tmp_path, 100.0, 90.0, 110.0, 50.0)
    for size in range(1, 5):
        made.add([(size,)])
        if size % 2 == 0:
            made.flush()
    traffic = read_traffic(made.path)
    assert traffic.times_s is not None
    assert traffic.times_s.tolist() == [90.0, 100.0, 100.0, 110.0]
    assert sorted(traffic.sizes[:, 0]) == [1, 2, 3, 4]


def test_the_files_stay_within_the_bound_and_keep_the_newest_rows(tmp_path: Path) -> None:
    bound = 8192
    made = recorder(tmp_path, max_bytes=bound)
    for i in range(1, 3000):
        made.add([(i,)])
        if i % 7 == 0:
            made.flush()
    made.flush()
    files = [*made.path.parent.iterdir()]
    assert len(files) == 2
    assert bound / 4 < sum(file.stat().st_size for file in files) <= bound
    sizes = read_traffic(made.path.parent).sizes[:, 0]
    assert sizes.tolist() == [*range(3000 - len(sizes), 3000)]


def test_a_disk_that_does_not_take_it_is_counted_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "there"
    directory.write_text("a file where a directory should be")
    made = recorder(directory)
    for _ in range(2):
        made.add([(8,), (9,)])
        made.flush()
    assert counted(made, "lost") == 4
    told = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(told) == 1
    assert "org/mini cannot be recorded (record.path)" in told[0].getMessage()
    directory.unlink()
    made.add([(10,)])
    made.flush()
    assert read_traffic(made.path).sizes.tolist() == [[10]]
    assert (counted(made, "written"), counted(made, "lost")) == (1, 4)


class Full:
    """A file on a disk that has room for five bytes more."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._room = 5
        self.tell, self.truncate = self._file.tell, self._file.truncate

    def write(self, data: memoryview) -> int:
        if not self._room:
            raise OSError(28, "No space left on device")
        written = self._file.write(data[: self._room])
        self._room -= written
        return written

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def test_half_a_line_on_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    class FullPath(type(tmp_path)):  # type: ignore[misc]
        def open(self, *_: Any, **__: Any) -> Any:
            return Full(Path(self))

    made = recorder(tmp_path)
    made.add([(8,)])
    made.flush()
    before, path = made.path.read_bytes(), made.path
    made.path = FullPath(path)
    made.add([(9,)])
    made.flush()
    assert path.read_bytes() == before
    made.path = path
    made.add([(10,)])
    made.flush()
    assert read_traffic(path).sizes.tolist() == [[8], [10]]
    assert (counted(made, "written"), counted(made, "lost")) == (2, 1)


def test_rows_that_pile_up_behind_a_disk_that_hangs_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "MAX_PENDING", 3)
    made = recorder(tmp_path)
    for _ in range(5):
        made.add([(8,), (9,)])
    assert counted(made, "lost") == 4
    made.flush()
    assert counted(made, "written") == 6


def test_rows_of_many_threads_are_all_there(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.start()
    threads = [
        threading.Thread(target=lambda: [made.add([(8,)]) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.close()
    assert read_traffic(made.path).rows == 2000


# --- in an engine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("text"))


def test_an_engine_records_what_it_accepts_and_tune_reads_it(
    text_dir: Path, tmp_path: Path
) -> None:
    config = engines.text_config(text_dir, record={"path": str(tmp_path / "traffic")})
    lengths = [3, 5, 8, 9, 12, 20, 24, 40]  # the last is longer than the model takes
    with engines.started(config) as engine:
        name = engine.spec.name
        engine.run([tiny.text_of(n) for n in lengths])
    (file,) = (tmp_path / "traffic" / name).iterdir()
    assert sorted(np.ravel(read_traffic(file).sizes)) == lengths
    assert engines.value(engine, "recorded_rows_total", result="written") == len(lengths)
    line = ["tune", "--trace", str(file.parent), "-k", "2"]
    result = CliRunner().invoke(main, line, catch_exceptions=False)
    assert "8 rows, seq; halves by row order" in result.stdout
    content = file.read_text()
    assert all(word not in content for word in tiny.text_of(40).split())


def test_recording_is_off_unless_it_is_asked_for(text_dir: Path) -> None:
    (model,) = engines.text_config(text_dir).models
    assert model.record is None


def test_the_directory_is_relative_to_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("models: [{path: m, record: {path: traffic}}]\n")
    (model,) = ServeConfig.from_yaml(file).models
    assert model.record == Record(path=str(tmp_path / "traffic"))
    with pytest.raises(ConfigError, match=r"record\.max_bytes: got 1, must be greater"):
        ServeConfig.from_dict({"models": [{"path": "m", "record": {"path": "t", "max_bytes": 1}}]})
