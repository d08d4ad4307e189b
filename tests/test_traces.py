import gzip
from pathlib import Path

import pytest

from shapeserve.errors import ConfigError
from shapeserve.traces import Trace, read_lengths, read_shapes, read_trace


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_trace_keeps_order_and_times(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "t_s,len\n0.0000,12\n0.5,7\n0.5,12\n")
    assert read_trace(path) == Trace((0.0, 0.5, 0.5), (12, 7, 12))


def test_lengths_of_a_trace_are_counted_in_ascending_order(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", "t_s,len\n0,12\n0.5,7\n\n0.5,12\n")
    assert list(read_lengths(path).items()) == [(7, 1), (12, 2)]


def test_lengths_of_a_histogram_add_up_repeated_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "h.csv", "tokens,count\r\n9,1\r\n6,3\r\n9,4\r\n")
    assert list(read_lengths(path).items()) == [(6, 3), (9, 5)]


def test_recorded_files_are_read_whole(data_dir: Path) -> None:
    trace = read_trace(data_dir / "enc_rag_mix.csv.gz")
    assert len(trace.lengths) == 19366
    assert sum(read_lengths(data_dir / "enc_rag_mix.csv.gz").values()) == 19366
    assert min(read_lengths(data_dir / "q_xquad.csv.gz")) == 6


BAD = {
    "header": ("a,b\n1,2\n", r":1: header is 'a,b'; a trace has t_s,len"),
    "empty file": ("", r":1: header is ''"),
    "no rows": ("t_s,len\n", r"header but no rows"),
    "fields": ("t_s,len\n0,1\n1,2,3\n", r":3: 3 fields; every line has 2"),
    "length word": ("t_s,len\n0,1\n1,x\n", r":3: len='x'; a whole number of at least 1"),
    "length zero": ("t_s,len\n0,0\n", r":2: len='0'"),
    "length fraction": ("t_s,len\n0,1.5\n", r":2: len='1.5'"),
    "count negative": ("tokens,count\n8,-1\n", r":2: count='-1'"),
    "time word": ("t_s,len\nnow,1\n", r":2: t_s='now'"),
    "time nan": ("t_s,len\nnan,1\n", r":2: t_s='nan'"),
    "time backwards": ("t_s,len\n2,1\n1,1\n", r":3: t_s='1'; seconds of at least 2"),
    "line after a blank one": ("t_s,len\n\n0,1\n0,?\n", r":4: len='\?'"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(ConfigError, match=message):
        read_lengths(path)


def test_a_histogram_is_not_a_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a trace has t_s,len"):
        read_trace(write(tmp_path / "h.csv", "tokens,count\n8,1\n"))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.csv: cannot be read: No such file"):
        read_lengths(tmp_path / "none.csv")
    not_gzip = tmp_path / "plain.csv.gz"
    not_gzip.write_text("t_s,len\n0,1\n")
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(b"t_s,len\n" + b"0,1\n" * 999)[:-12])
    not_text = tmp_path / "binary.csv"
    not_text.write_bytes(b"\xff\xfe\x00")
    for path in (not_gzip, cut, not_text):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_lengths(path)


def test_shapes_are_counted_along_the_axes_that_the_header_names(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "t_s,height,width\n0,480,640\n1,640,480\n2,480,640\n")
    shapes = read_shapes(path)
    assert shapes.axes == ("height", "width")
    assert shapes.rows == {(480, 640): 2, (640, 480): 1}
    with pytest.raises(ConfigError, match=r"sizes along height, width; a trace of lengths has"):
        read_lengths(path)


def test_one_axis_needs_no_name(tmp_path: Path) -> None:
    for header in ("t_s,len", "tokens,count"):
        assert read_shapes(write(tmp_path / "t.csv", f"{header}\n3,4\n")).axes == ()
    named = read_shapes(write(tmp_path / "t.csv", "t_s,frames\n0,4\n"))
    assert (named.axes, named.rows) == (("frames",), {(4,): 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t_s,height,width\n0,1\n", r":2: 2 fields; every line has 3: t_s,height,width"),
        ("t_s,height,width\n0,1,x\n", r":2: width='x'; a whole number"),
        ("t_s,height,height\n0,1,1\n", r":1: header is 't_s,height,height'"),
        ("t_s,the width\n0,1\n", r":1: header is 't_s,the width'"),
    ],
)
def test_a_bad_trace_of_shapes_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_shapes(write(tmp_path / "bad.csv", text))


def test_recorded_images_and_recordings_are_read_whole(data_dir: Path) -> None:
    assert sum(read_shapes(data_dir / "coco_val2017.csv.gz").rows.values()) == 5000
    assert sum(read_shapes(data_dir / "librispeech_devclean.csv.gz").rows.values()) == 2703
