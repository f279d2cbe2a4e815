"""Edits in the layouts of the data sets that people train with, and of other trainers.

Each is written as its own description says: the data sets' cards and READMEs, and the documentation
of ai-toolkit and musubi-tuner; the modules under test name them.
"""

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data_sets import edit_row, picture, png, write_parquet

from diffusax.training.data.batches import Batches
from diffusax.training.data.edits import EditSource
from diffusax.training.data.examples import choose_edit, cut_images, read_image
from diffusax.training.data.finding import open_source
from diffusax.training.data.opening import open_data, open_images
from diffusax.training.data.options import EditDataConfig
from diffusax.training.data.sources import ArrowSource, SourceFailed

COLUMNS = ("input_image", "edit_prompt", "edited_image")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("DIFFUSAX_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(folder: Path, files: dict) -> Path:
    """Writes pictures for numbers, text for texts, and JSON for what else there is."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, int):
            picture(content, (8, 8)).save(file)
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return folder


def lines(*rows: dict) -> str:
    return "".join(json.dumps(one) + "\n" for one in rows)


def opened(path, references: int = 1, **options):
    config = EditDataConfig(str(path), **options)
    names = (config.original_image_column, config.edit_prompt_column, config.edited_image_column)
    return open_data(config, names, references=references)


def which(cell) -> int:
    """The number of the picture in a cell."""
    image = read_image(cell)
    return next(i for i in range(64) if picture(i, image.size).tobytes() == image.tobytes())


def edits(path, references: int = 1, **options) -> list:
    """What a data set's rows are: the pictures before, what to do, the picture after."""
    source = opened(path, references, **options)
    asked, found = source.asked, []
    for i in range(len(source)):
        row = source[i]
        before = [which(cell) for cell in row[asked.originals[0]]]
        found.append((before, row[asked.prompt], which(row[asked.edited])))
    return found


def cell(number: int) -> dict:
    return {"bytes": png(picture(number, (8, 8))), "path": f"{number}.png"}


TABLES = {
    "fusing/instructpix2pix-1000-samples": {
        "input_image": cell(1), "edit_prompt": "a", "edited_image": cell(2),
    },
    "timbrooks/instructpix2pix-clip-filtered": {
        "original_prompt": "x", "original_image": cell(1), "edit_prompt": "a",
        "edited_prompt": "y", "edited_image": cell(2),
    },
    "BleachNick/UltraEdit_500k": {
        "source_image": cell(1), "edited_image": cell(2), "edit_prompt": "a",
        "source_caption": "x", "mask_image": cell(3),
    },
    "osunlp/MagicBrush": {
        "img_id": "7", "turn_index": 1, "source_img": cell(1), "mask_img": cell(3),
        "instruction": "a", "target_img": cell(2),
    },
    "TIGER-Lab/OmniEdit-Filtered-1.2M": {
        "omni_edit_id": "t", "task": "swap", "src_img": cell(1), "edited_img": cell(2),
        "edited_prompt_list": ["a", "aa"], "sc_score_1": 9, "o_score": 9.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_with_images_are_recognised_by_their_columns(tmp_path, name):
    folder = write_parquet(tmp_path / "data", [TABLES[name]] * 2)
    prompt = ["a", "aa"] if "Omni" in name else "a"
    assert edits(folder) == [([1], prompt, 2)] * 2
    with pytest.raises(ValueError, match="has no column 'mine'"):
        edits(folder, edit_prompt_column="mine")


def test_what_a_user_names_wins_over_usual_names(tmp_path):
    rows = [{**edit_row(1), "instruction": "other", "ref": edit_row(2)["input_image"]}]
    folder = write_parquet(tmp_path / "data", [*rows, {**rows[0], "ref": None}])
    assert opened(folder, edit_prompt_column="instruction")[0]["instruction"] == "other"
    source = opened(folder, references=2, reference_columns=("ref",))
    found = [[which(cell) for cell in source[i]["input_image"]] for i in range(2)]
    assert found == [[1, 2], [1]]


def test_a_table_that_is_streamed_is_recognised_too(tmp_path, hub):
    folder = write_parquet(tmp_path / "data", [TABLES["osunlp/MagicBrush"]] * 3)
    files = {f"data/{file.name}": file.read_bytes() for file in folder.iterdir()}
    hub({"datasets/owner/edits": files})
    assert edits("owner/edits", streaming=True) == [([1], "a", 2)] * 3
    source = opened("owner/edits", streaming=True, streaming_window=1)
    batch = next(Batches(source, example(EditDataConfig()), batch_size=2, seed=0))
    assert batch["before"].shape == (2, 1, 8, 8, 3)


def test_gpt_image_edit(tmp_path):
    one = {"dataset_source": "hqedit", "task": "edit", "instruction_type": "original"}
    write(
        tmp_path / "gpt-edit",
        {
            "hqedit/edit/input/01.png": 1,
            "hqedit/edit/output/01.png": 2,
            "hqedit/edit/metadata/hqedit_edit.json": [
                {**one, "id": "e1", "input": "input/01.png", "output": "output/01.png",
                 "instruction": "a", "input_description": "x"},
            ],
            "ultraedit/add/input/01.png": 3,
            "ultraedit/add/output/01.png": 4,
            "ultraedit/add/metadata/ultraedit_add.json": [
                {**one, "id": "u1", "input": "input/01.png", "output": "output/01.png",
                 "instruction": "b", "input_description": "y"},
            ],
        },
    )  # fmt: skip
    assert edits(tmp_path / "gpt-edit") == [([1], "a", 2), ([3], "b", 4)]
    assert edits(tmp_path / "gpt-edit" / "ultraedit") == [([3], "b", 4)]


PICO = {
    "openimages/train_0/aa.jpeg.png": 1,
    "images/positive-edit/1.png": 2,
    "images/positive-edit/2.png": 3,
    "images/negative-edit/2.png": 9,
    "images/multi-turn/7_turn1.png": 4,
    "images/multi-turn/7_turn2.png": 5,
    "images/multi-turn/7_turn3.png": 6,
}
SINGLE = {
    "open_image_input_url": "https://farm6.staticflickr.com/1_o.jpg",
    "text": "Remove the red flag",
    "output_image": "images/positive-edit/1.png",
    "edit_type": "Remove an existing object",
    "summarized_text": "Flag removed",
}
PREFERENCE = {
    **SINGLE,
    "output_image": "images/positive-edit/2.png",
    "rejected_images": ["images/negative-edit/2.png"],
}
TURNS = {
    "files": [
        {"id": "edit_turn1", "url": "images/multi-turn/7_turn1.png"},
        {"id": "edit_turn2", "url": "images/multi-turn/7_turn2.png"},
        {"id": "final_image", "url": "images/multi-turn/7_turn3.png"},
        {"id": "original_input_image", "url": "https://farm8.staticflickr.com/2_o.jpg"},
    ],
    "metadata_edit_turn_prompts": ["one", "two", "three"],
}


def test_pico_banana(tmp_path):
    here = {"local_input_image": "openimages/train_0/aa.jpeg.png"}
    write(
        tmp_path,
        {
            **PICO,
            # As downloaded, without the paths of the images before: these lines are not read.
            "jsonl/sft.jsonl": lines(SINGLE),
            "jsonl/sft_with_local_source_image_path.jsonl": lines(SINGLE | here),
            "jsonl/preference_local.jsonl": lines(PREFERENCE | here),
            "jsonl/turns_local.jsonl": lines(TURNS | here),
        },
    )
    turns = [([1], "one", 4), ([4], "two", 5), ([5], "three", 6)]
    one, preferred = ([1], SINGLE["text"], 2), ([1], SINGLE["text"], 3)
    assert edits(tmp_path) == [preferred, one, *turns]
    short = edits(tmp_path, edit_prompt_column="summarized_text")
    assert short[:2] == [([1], "Flag removed", 3), ([1], "Flag removed", 2)]


def test_pico_banana_s_images_that_were_not_found_are_left_out_and_counted(tmp_path, caplog):
    here = {"local_input_image": "openimages/train_0/aa.jpeg.png"}
    away = {"local_input_image": None}
    write(tmp_path, {**PICO, "sft.jsonl": lines(SINGLE | here, SINGLE | away, TURNS | away)})
    # Of the turns, only the first starts from an image that is not there.
    assert [before for before, _, _ in edits(tmp_path)] == [[1], [4], [5]]
    assert "2 of 5 edits" in caplog.text
    assert "line 2 names no image before the edit" in caplog.text


def test_imgedit(tmp_path):
    one = [
        {"input_images": [["results_add/1/original.png"]], "prompt": "a",
         "output_images": [["results_add/1/result.png"]]},
        # The tables of actions have names of files alone.
        {"input_images": [["bare.png"]], "prompt": "b", "output_images": [["bare_out.png"]]},
    ]  # fmt: skip
    turns = {
        "data": [
            {"input_images": ["m/1.png"], "prompt": "c", "output_images": ["m/2.png"]},
            {"input_images": [], "prompt": "d", "output_images": ["m/3.png"]},
        ]
    }
    folder = write(
        tmp_path,
        {
            "Singleturn/results_add/1/original.png": 1,
            "Singleturn/results_add/1/result.png": 2,
            # Each image has notes beside it.
            "Singleturn/results_add/1/result.json": {"edit_type": "add", "prompt": "a"},
            "Singleturn/bare.png": 3,
            "Singleturn/bare_out.png": 4,
            "Multiturn/m/1.png": 5,
            "Multiturn/m/2.png": 6,
            "Multiturn/m/3.png": 7,
        },
    )
    (folder / "Parquet").mkdir()
    pq.write_table(pa.Table.from_pylist(one), folder / "Parquet/add_part0.parquet")
    pq.write_table(pa.Table.from_pylist([turns]), folder / "Parquet/version.parquet")
    expected = [([1], "a", 2), ([3], "b", 4), ([5], "c", 6), ([6], "d", 7)]
    assert edits(folder) == expected
    two = [{**one[0], "input_images": [["results_add/1/original.png"], ["bare.png"]]}]
    pq.write_table(pa.Table.from_pylist(two), folder / "Parquet/add_part0.parquet")
    assert edits(folder, references=2)[0] == ([1, 3], "a", 2)


AITK = {
    "target/a.png": 1, "target/a.txt": "make it red", "target/b.jpg.png": 2,
    "target/b.jpg.txt": "b", "control_1/a.png": 3, "control_1/b.jpg.png": 4,
    "control_2/a.webp.png": 5, "control_2/a.png": 6,
}  # fmt: skip


def test_ai_toolkit_s_folders(tmp_path):
    write(tmp_path, AITK)
    assert edits(tmp_path, references=3) == [([3, 6], "make it red", 1), ([4], "b", 2)]
    named = edits(tmp_path, original_image_column="control_2", reference_columns=("control_1",),
                  edited_image_column="target", references=2)  # fmt: skip
    assert named == [([6, 3], "make it red", 1), ([4], "b", 2)]
    with pytest.raises(ValueError, match="has 2 images before the edit, and this model looks at 1"):
        edits(tmp_path)


def test_targets_may_lie_above_their_controls_and_each_group_has_its_own(tmp_path):
    write(tmp_path, {
        "a.png": 1, "a.txt": "one", "control/a.png": 2, "x/targets/a.png": 3,
        "x/targets/a.txt": "two", "x/control/a.png": 4,
    })  # fmt: skip
    assert edits(tmp_path) == [([2], "one", 1), ([4], "two", 3)]


def test_musubi_tuner_s_folders(tmp_path):
    write(tmp_path, {
        "image_dir/image1.png": 1, "image_dir/image1.txt": "one", "image_dir/image2.png": 2,
        "image_dir/image2.txt": "two", "control_dir/image1_0000.png": 3,
        "control_dir/image1_0001.png": 4, "control_dir/image2.png": 5,
    })  # fmt: skip
    assert edits(tmp_path, references=2) == [([3, 4], "one", 1), ([5], "two", 2)]


def test_musubi_tuner_s_lines(tmp_path, monkeypatch):
    elsewhere = write(tmp_path / "pictures", {f"{i}.png": i for i in range(1, 6)})
    line = {"image_path": str(elsewhere / "1.png"), "caption": "one"}
    two = {"control_path_0": str(elsewhere / "2.png"), "control_path_1": "../pictures/3.png"}
    rows = [line | two, {"image_path": "4.png", "control_path": "5.png", "caption": "two"}]
    folder = write(tmp_path / "lines", {"metadata.jsonl": lines(*rows)})
    monkeypatch.chdir(elsewhere)
    expected = [([2, 3], "one", 1), ([5], "two", 4)]
    assert edits(folder, references=2) == expected
    assert edits(folder / "metadata.jsonl", references=2) == expected
    # Those of a data set from the Hub must not lead out of it.
    columns = EditDataConfig().columns
    with pytest.raises(ValueError, match="which is not there"):
        open_source(str(folder), COLUMNS, edits=columns, own=False)


def test_paths_may_stand_under_any_names_that_are_given(tmp_path):
    write(tmp_path, {"a.png": 1, "b.png": 2, "c.png": 3,
                     "train.jsonl": lines({"src": "a.png", "what": "x", "dst": "b.png"}),
                     "val.jsonl": lines({"src": "a.png", "what": "y", "dst": "c.png"}),
                     })  # fmt: skip
    names = {"original_image_column": "src", "edit_prompt_column": "what"}
    names |= {"edited_image_column": "dst"}
    assert edits(tmp_path, **names) == [([1], "x", 2)]
    assert edits(tmp_path, **names, split="val") == [([1], "y", 3)]


def test_edits_that_cannot_be_used_are_left_out_and_counted(tmp_path, caplog):
    good = {"input": "a.png", "instruction": "x", "output": "b.png"}
    rows = [good] * 300 + [{**good, "instruction": " "}, {**good, "output": "c.png"}]
    write(tmp_path, {"a.png": 1, "b.png": 2, "all.jsonl": lines(*rows)})
    assert len(opened(tmp_path)) == 300
    for part in ("2 of 302 edits", "line 301 has no instruction", "'c.png', which is not there"):
        assert part in caplog.text
    write(tmp_path, {"all.jsonl": lines(*rows[-60:]), "x.tar.split.000": "x"})
    with pytest.raises(ValueError, match=r"2 of 60 edits .*unpack the archives, bring the files"):
        opened(tmp_path)
    write(tmp_path, {"all.jsonl": "[" + json.dumps(good) + "\n"})
    with pytest.raises(ValueError, match=r"all.jsonl line 1: .*must be one JSON object"):
        opened(tmp_path)


def test_folders_without_an_instruction_or_a_control_end_a_run(tmp_path):
    write(tmp_path, {**AITK, "target/c.png": 7, "target/d.png": 8, "control_1/d.png": 9})
    with pytest.raises(ValueError, match=r"2 of 4 images .*c.png has no image of its name"):
        opened(tmp_path, references=2)


OPTIONAL = {
    "Parquet": [
        {"input_image": cell(1), "edit_prompt": "a", "edited_image": cell(2)},
        {"input_image": None, "edit_prompt": "b", "edited_image": cell(3)},
    ],
    "Parquet of lists": [
        {"input": [cell(1)], "instruction": "a", "output": cell(2)},
        {"input": [], "instruction": "b", "output": cell(3)},
    ],
    "metadata": {
        "metadata.jsonl": lines(
            {"input_image_file_name": None, "edited_image_file_name": "3.png", "edit_prompt": "b"},
            {"edited_image_file_name": "2.png", "edit_prompt": "a",
             "input_image_file_names": ["1.png"]},
        ),
    },
    "lines": {
        "all.jsonl": lines({"image_path": "3.png", "caption": "b"},
                           {"image_path": "2.png", "caption": "a", "control_path": "1.png"}),
    },
    "folders": {"2.txt": "a", "3.txt": "b", "control/2.png": 1},
}  # fmt: skip


@pytest.mark.parametrize("layout", OPTIONAL)
def test_rows_may_lack_images_to_look_at_where_these_are_optional(tmp_path, layout):
    content = OPTIONAL[layout]
    if isinstance(content, list):
        write_parquet(tmp_path, content)
    else:
        numbers = (2, 3) if layout == "folders" else (1, 2, 3)
        write(tmp_path, {**content, **{f"{i}.png": i for i in numbers}})
    found = edits(tmp_path, references=2, references_optional=True)
    assert sorted(found) == [([], "b", 3), ([1], "a", 2)]
    config = EditDataConfig(str(tmp_path), references_optional=True)
    side = {"image_column": COLUMNS[2], "side": 8, "factor": 1}
    source = open_images(config, COLUMNS, **side, references=2)
    assert source.buckets.references == (0, 1)
    assert sorted(source.buckets.of_row) == [0, 1]
    with pytest.raises(ValueError, match=r"before|no image of its name|is null in 1|edited_image"):
        edits(tmp_path, references=2)


def test_rows_that_lack_images_are_in_no_batch_where_these_are_not_optional(tmp_path):
    whole, lacking = OPTIONAL["Parquet of lists"]
    two = {**whole, "input": whole["input"] * 2}
    side = {"image_column": COLUMNS[2], "side": 8, "factor": 1}
    config = EditDataConfig(str(write_parquet(tmp_path, [whole, lacking, two])))
    source = open_images(config, COLUMNS, **side, references=2)
    assert source.buckets.references == (1, 2)
    assert source.buckets.of_row.tolist() == [0, -1, 1]


def test_which_streamed_rows_lack_images_is_not_known():
    with pytest.raises(ValueError, match=r"references_optional cannot be with data.streaming"):
        EditDataConfig("owner/name", streaming=True, references_optional=True)


def test_rows_with_more_images_than_the_model_looks_at_end_a_run(tmp_path):
    one, two = ({"input_image": [cell(1)] * n, "edit_prompt": "a", "edited_image": cell(2)}
                for n in (1, 2))  # fmt: skip
    # Of 150 rows a hundred are looked at before a run, and the third is none of these.
    source = opened(write_parquet(tmp_path / "data", [one, one, two, *[one] * 147]))
    with pytest.raises(SourceFailed, match="row 2 has 2 images before the edit"):
        source[2]
    with pytest.raises(ValueError, match=r"row 2 has 2 images .*, and this model looks at 1"):
        for _ in zip(range(75), Batches(source, example(EditDataConfig()), batch_size=2, seed=0)):
            pass
    with pytest.raises(ValueError, match="row 0 has 2 images before the edit"):
        opened(write_parquet(tmp_path / "other", [two] * 4))


@dataclasses.dataclass(frozen=True)
class example:
    """Makes examples as recipes do: the images before, r h w 3, and the one after."""

    config: EditDataConfig
    size: int = 8

    def __call__(self, row, rng):
        config = self.config
        prompt, after = choose_edit(
            row[config.edit_prompt_column], row[config.edited_image_column], rng
        )
        cells = [after, *row[config.original_image_column]]
        pixels, _, _ = cut_images(config, self.size, row, cells, rng)
        text = np.frombuffer(prompt.encode().ljust(8), np.uint8)
        return {"after": pixels[0], "before": np.stack(pixels[1:]), "text": text}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Edits of two shapes, with one to three images to look at, of which one is broken."""
    folder, rows = tmp_path_factory.mktemp("mixed"), []
    for i in range(120):
        size = (24, 12) if i % 2 else (16, 16)
        names = [f"{i}_{k}.png" for k in range(2 + i % 3)]
        for k, name in enumerate(names):
            picture(4 * i + k, size).save(folder / name)
        after, *before = names
        rows.append({"image_path": after, "caption": f"edit {i}"})
        rows[-1] |= {f"control_path_{k}": name for k, name in enumerate(before)}
    (folder / "7_1.png").write_bytes(b"no image")
    (folder / "lines.jsonl").write_text(lines(*rows))
    return folder


@pytest.mark.parametrize("bucketed", [True, False])
def test_a_batch_is_of_one_number_of_images_and_goes_on_exactly(mixed, bucketed, caplog):
    caplog.set_level(logging.INFO, "diffusax.training")
    options = {"buckets": ("16x16", "24x12")} if bucketed else {}
    config = EditDataConfig(str(mixed), **options)
    side = {"image_column": COLUMNS[2], "side": 16, "factor": 1}
    source = open_images(config, COLUMNS, **side, references=3)
    assert (
        "16x16+1 20, 16x16+2 20" if bucketed else "16x16+1 40, 16x16+2 40, 16x16+3 40"
    ) in caplog.text

    def batches():
        return Batches(source, example(config, 16), batch_size=2, seed=3)

    run, seen = batches(), []
    for number in range(50):
        if number == 9:
            state = run.get_state()
        batch = next(run)
        high, wide = batch["after"].shape[1:3]
        assert batch["before"].shape[2:] == (high, wide, 3)
        assert f"{wide}x{high}+{batch['before'].shape[1]}" == run.bucket
        seen.append(batch)
    again = batches()
    again.set_state(json.loads(json.dumps(state)))
    for batch in seen[9:]:
        other = next(again)
        assert batch.keys() == other.keys()
        assert all(np.array_equal(batch[key], other[key]) for key in batch)
    texts = {row.tobytes() for batch in seen for row in batch["text"]}
    assert len(texts) >= 95
    assert b"edit 7  " not in texts
    assert run.tally.broken == 1
    assert "skipped" in caplog.text


def test_a_data_set_whose_rows_are_alike_has_no_buckets(tmp_path):
    write(tmp_path, {"target/a.png": 1, "target/a.txt": "x", "control/a.png": 2})
    config = EditDataConfig(str(tmp_path))
    found = open_images(config, COLUMNS, image_column=COLUMNS[2], side=8, factor=1, references=3)
    assert isinstance(found, EditSource)


def test_images_are_counted_without_being_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    one = {"bytes": b"x", "path": None}
    cells = {
        "images": [[one, one], [one], [], None],
        "image": [one, {"bytes": None, "path": None}, None, {"bytes": None, "path": "a.png"}],
        "plain": [b"x", None, b"y", b""],
    }
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    types = {"images": pyarrow.list_(kind), "image": kind, "plain": pyarrow.binary()}
    table = pyarrow.table(cells, schema=pyarrow.schema(types))
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    source = ArrowSource((str(tmp_path / "a.arrow"),), ("a",))
    counts = {name: source.count_cells(name).tolist() for name in cells}
    assert counts == {"images": [2, 1, 0, 0], "image": [1, 0, 0, 1], "plain": [1, 0, 1, 1]}
