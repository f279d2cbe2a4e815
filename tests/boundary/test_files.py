import os

import pytest

from diffusax.boundary import files
from diffusax.boundary.files import load_json, read_text, write_json, written_whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"a": ', "is not valid JSON"),
        (b"[]", "must hold a JSON object, not list"),
        (b"null", "must hold a JSON object, not NoneType"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b'{"a": ' * 100_000, "is nested too deep"),
        (b'{"a":' + b"[" * 100_000, "is nested too deep"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not valid JSON"),
    ],
)
def test_a_broken_json_file_is_one_sentence_that_names_it(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json {message}") as error:
        load_json(path)
    assert "\n" not in str(error.value)


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config.json is missing"):
        load_json(tmp_path / "config.json")
    with pytest.raises(ValueError, match="is not a file"):
        load_json(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="fifo is not a file"):
        load_json(tmp_path / "fifo")


def test_a_file_of_absurd_size_is_not_read(tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="huge has 1099511627776 bytes; at most"):
        load_json(tmp_path / "huge")
    with pytest.raises(ValueError, match="at most 10 are read"):
        read_text(tmp_path / "huge", 10)


def test_json_round_trip(tmp_path):
    data = {"a": [1, 2.5, None, "é"], "b": {}}
    write_json(tmp_path / "a.json", data)
    assert load_json(tmp_path / "a.json") == data
    assert (tmp_path / "a.json").read_bytes().isascii()


def test_a_file_appears_only_when_whole(tmp_path):
    path = tmp_path / "a"
    path.write_text("before")

    def write(error):
        with written_whole(path) as partial:
            partial.write_text("after")
            raise error

    with pytest.raises(OSError, match=f"^{path} could not be written \\(No space left\\)$"):
        write(OSError(28, "No space left"))
    with pytest.raises(KeyboardInterrupt):
        write(KeyboardInterrupt())
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert files.MAX_JSON_BYTES > 20e6
