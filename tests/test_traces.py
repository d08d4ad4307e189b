import gzip
from pathlib import Path

import numpy as np
import pytest

from shapeserve.errors import ConfigError
from shapeserve.traces import Traffic, read_lengths, read_shapes, read_traffic


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_trace_keeps_order_and_times(tmp_path: Path, name: str) -> None:
    traffic = read_traffic(write(tmp_path / name, "t_s,len\n0.0000,12\n0.5,7\n0.5,12\n"))
    assert traffic.axes == ("seq",)
    assert traffic.sizes.tolist() == [[12], [7], [12]]
    assert traffic.times_s is not None
    assert traffic.times_s.tolist() == [0.0, 0.5, 0.5]
    assert traffic.rows == 3


@pytest.mark.parametrize(
    "text",
    [
        "t_s,len,model\n0,12,a\n1,7,b\n",
        "t_s,user,len\n0,3,12\n1,4,7\n",  # no axis, although its values could be sizes
        "len,t_s\n12,0\n7,1\n",
        "t_s,len,tokens,count\n0,12,1,1\n1,7,1,1\n",
        "\ufefft_s,len\n0,12\n1,7\n",  # as spreadsheets write it
    ],
)
def test_columns_beside_len_are_ignored_wherever_they_are(tmp_path: Path, text: str) -> None:
    one = read_traffic(write(tmp_path / "one.csv", text))
    assert (one.axes, one.sizes.tolist()) == (("seq",), [[12], [7]])
    assert one.times_s is not None
    assert one.times_s.tolist() == [0, 1]


def test_other_names_are_axes(tmp_path: Path) -> None:
    two = read_traffic(write(tmp_path / "two.csv", "t_s,height,width\n0,480,640\n1,64,32\n"))
    assert (two.axes, two.sizes.tolist()) == (("height", "width"), [[480, 640], [64, 32]])


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_jsonl_trace_reads_as_the_csv_one_whatever_the_order_of_keys(
    tmp_path: Path, name: str
) -> None:
    lines = '{"len": 12, "t_s": 0, "ids": [1]}\n\n{"t_s": 0.5, "len": 7}\n'
    traffic = read_traffic(write(tmp_path / name, lines))
    assert (traffic.axes, traffic.sizes.tolist()) == (("seq",), [[12], [7]])
    histogram = write(tmp_path / "h.jsonl", '{"count": 3, "tokens": 9, "licence": "MIT"}\n')
    assert read_lengths(histogram) == {9: 3}
    axes = write(tmp_path / "i.jsonl", '{"height": 4, "t_s": 0, "width": 8}\n')
    assert read_traffic(axes).axes == ("height", "width")


def traffic_of(*lengths: int, timed: bool = True) -> Traffic:
    sizes = np.array(lengths)[:, None]
    times_s = np.arange(float(len(lengths))) if timed else None
    return Traffic(("seq",), sizes, np.ones(len(lengths)), times_s)


def test_halves_of_a_trace_are_by_row_order_and_the_second_may_be_longer() -> None:
    first, second = traffic_of(5, 1, 9, 2, 7).halves()
    assert first.sizes[:, 0].tolist() == [5, 1]
    assert second.sizes[:, 0].tolist() == [9, 2, 7]
    assert second.times_s is not None
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        traffic_of(5).halves()


def test_halves_of_a_histogram_are_dealt_at_random_and_add_up() -> None:
    histogram = Traffic(("seq",), np.array([[4], [9], [30]]), np.array([1000.0, 1001.0, 1.0]))
    first, second = histogram.halves()
    assert (first.rows, second.rows) == (1001, 1001)
    assert 400 < first.counts[0] < 600  # not all of the short ones
    total = sum(
        dict(zip(h.sizes[:, 0].tolist(), h.counts, strict=True)).get(9, 0) for h in (first, second)
    )
    assert total == 1001
    assert histogram.halves()[0].counts.tolist() == first.counts.tolist()


def test_a_histogram_of_billions_of_rows_is_dealt_too() -> None:
    histogram = Traffic(("seq",), np.array([[4], [9]]), np.array([3e9, 1e12]))
    first, second = histogram.halves()
    assert first.rows + second.rows == histogram.rows
    assert first.counts / histogram.counts == pytest.approx([0.5, 0.5], abs=1e-3)


def test_clipping_keeps_every_row() -> None:
    assert traffic_of(5, 100).clipped({"seq": 8}).sizes[:, 0].tolist() == [5, 8]


def test_lengths_of_a_trace_are_counted_in_ascending_order(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", "t_s,len\n0,12\n0.5,7\n\n0.5,12\n")
    assert list(read_lengths(path).items()) == [(7, 1), (12, 2)]


def test_lengths_of_a_histogram_add_up_repeated_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "h.csv", "tokens,count\r\n9,1\r\n6,3\r\n9,4\r\n")
    assert list(read_lengths(path).items()) == [(6, 3), (9, 5)]


def test_recorded_files_are_read_whole(data_dir: Path, trace_dir: Path) -> None:
    assert read_traffic(trace_dir / "enc_rag_mix.csv.gz").rows == 19366
    assert sum(read_lengths(trace_dir / "enc_rag_mix.csv.gz").values()) == 19366
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
    "length beyond any model": (
        "t_s,len\n0,9999999999\n",
        r":2: len='9999999999'; .* at most 2147",
    ),
    "axis twice": ("t_s,height,height\n0,1,1\n", r":1: header is 't_s,height,height'"),
    "length twice": ("t_s,len,len\n0,1,2\n", r":1: header is 't_s,len,len'.* each name once"),
    "second axis": ("t_s,height,width\n0,1,1\n0,1,-3\n", r":3: width='-3'"),
    "line after a blank one": ("t_s,len\n\n0,1\n0,?\n", r":4: len='\?'"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(ConfigError, match=message):
        read_lengths(path)


BAD_JSON = {
    "no object": ('{"t_s": 0, "len": 3}\n7\n', r":2: '7'; a JSON object is needed"),
    "no JSON": ('{"t_s": 0, "len"\n', r":1: .*; a JSON object is needed"),
    "key missing": (
        '{"t_s": 0, "len": 3}\n{"t_s": 0}\n',
        r":2: has no len; every line has t_s, len",
    ),
    "length true": ('{"t_s": 0, "len": true}\n', r":1: len='true'"),
    "length text": ('{"t_s": 0, "len": "8"}\n', r':1: len=\'"8"\''),
    "other keys": ('{"a": 0}\n', r":1: header is 'a'"),
    "empty": ("\n", r":1: header is ''"),
}


@pytest.mark.parametrize(("text", "message"), BAD_JSON.values(), ids=BAD_JSON.keys())
def test_a_bad_json_line_is_named_with_its_number(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", text)
    with pytest.raises(ConfigError, match=message):
        read_traffic(path)


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


def test_recorded_images_and_recordings_are_read_whole(trace_dir: Path) -> None:
    assert sum(read_shapes(trace_dir / "coco_val2017.csv.gz").rows.values()) == 5000
    assert sum(read_shapes(trace_dir / "librispeech_devclean.csv.gz").rows.values()) == 2703


# --- directories


def test_the_traces_of_a_directory_are_merged_by_time_from_the_first_row_on(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "t_s,seq\n1000.5,1\n1002,3\n")
    write(tmp_path / "b.csv.gz", "t_s,seq\n1000,7\n1001.5,8\n1002,9\n")
    write(tmp_path / "notes.txt", "not a trace")
    traffic = read_traffic(tmp_path)
    assert (traffic.axes, traffic.rows, traffic.named) == (("seq",), 5, True)
    assert traffic.times_s is not None
    assert traffic.times_s.tolist() == [0.0, 0.5, 1.5, 2.0, 2.0]
    assert traffic.sizes[:, 0].tolist() == [7, 1, 8, 3, 9]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t_s,height,width\n0,4,4\n", r"b.csv is of height, width; .* \(here seq\)"),
        ("tokens,count\n4,4\n", "b.csv is a histogram; a directory has traces of one model"),
        ("t_s,seq\n0,zero\n", "b.csv:2: seq='zero'"),
    ],
    ids=["axes", "histogram", "line"],
)
def test_what_does_not_go_together_in_a_directory_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    write(tmp_path / "a.csv", "t_s,seq\n0,1\n")
    write(tmp_path / "b.csv", text)
    with pytest.raises(ConfigError, match=message):
        read_traffic(tmp_path)
