"""XLA_FLAGS and its relatives, read as XLA reads them."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcache.errors import UncacheableError
from xcache.keys.flags import collect, refuse_unseen
from xcache.keys.options import LEFT_OUT

names = st.from_regex(r"xla_(cpu|gpu|tpu)_[a-z]{3,12}", fullmatch=True).filter(lambda n: n not in LEFT_OUT.values())
flags = st.dictionaries(names, st.from_regex(r"[a-z0-9./,]{1,8}", fullmatch=True), max_size=6)


def of(text: str = "", *, libtpu: str = "", argv: tuple[str, ...] = ()) -> bytes:
    return collect({"XLA_FLAGS": text, "LIBTPU_INIT_ARGS": libtpu}, ("prog", *argv))


def written(chosen: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in chosen.items()]


@given(flags, st.randoms(use_true_random=False), st.sampled_from([" ", "  ", "\n", "\t "]))
def test_order_counts_and_spacing_does_not(chosen, random, space):
    shuffled = written(chosen)
    random.shuffle(shuffled)
    assert of(space.join(shuffled)) == of(" ".join(shuffled))
    assert (of(" ".join(shuffled)) == of(" ".join(written(chosen)))) == (shuffled == written(chosen))


def test_a_repeated_flag_counts_each_time():
    """Some flags add to what was said before."""
    assert len({of(text) for text in ("--xla_a=1 --xla_a=2", "--xla_a=2 --xla_a=1", "--xla_a=2")}) == 3


@pytest.mark.parametrize("value", ["1", "2"])
def test_each_source_is_a_list_of_its_own(value):
    """A flag of libtpu's, or an argument, once hid a flag of the same name in XLA_FLAGS."""
    beside = [of("--xla_a=1", libtpu=f"--xla_a={value}"), of("--xla_a=1", argv=(f"--xla_a={value}",))]
    other = [of("--xla_a=3", libtpu=f"--xla_a={value}"), of("--xla_a=3", argv=(f"--xla_a={value}",))]
    assert len({*beside, *other, of(f"--xla_a={value}")}) == 5


@given(flags, names, st.text("abc", min_size=1, max_size=3))
def test_every_flag_that_may_change_code_counts(chosen, name, value):
    chosen.pop(name, None)
    rest = written(chosen)
    assert of(" ".join([*rest, f"--{name}={value}"])) != of(" ".join(rest))


@given(flags, st.sampled_from(sorted(LEFT_OUT.values())), st.text("abc/", min_size=1, max_size=8))
def test_flags_that_dump_log_or_name_a_cache_do_not_count(chosen, name, value):
    assert of(" ".join([*written(chosen), f"--{name}={value}"])) == of(" ".join(written(chosen)))


def test_quotes_are_taken_off_as_xla_does():
    assert of("--xla_a='x y' --xla_b=1") == of('--xla_a="x y" --xla_b=1')
    assert of(r'--xla_a="x\"y"') == of("--xla_a='x\"y'")
    assert of("--xla_a='x y'") != of("--xla_a=x y")


def test_a_flag_without_a_value_is_true():
    assert of("--xla_a") == of("--xla_a=true")


def test_arguments_and_libtpu_flags_count():
    assert of(argv=("--xla_a=1", "--other=2")) == of(argv=("--xla_a=1",)) != of()
    assert of(libtpu="--xla_a=1") != of()
    assert of(argv=("--other=2",)) == of()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--xla_a=1", '--xla_a="1"'),
        ("--xla_a=1 --xla_b=2", "--xla_a=1\t--xla_b=2"),
        ("--xla_a=1", "---xla_a=1"),
        ("--xla_a=1", "--xla_jf_dump_to --xla_a=1"),
        ("--xla_a --xla_jf_dump_to=b", "--xla_a --xla_jf_dump_to=c"),
        ("--xla_a --xla_jf_dump_to=b", "--xla_a  --xla_jf_dump_to=b"),
    ],
)
def test_libtpus_flags_count_as_written(one, other):
    """It splits at spaces only, knows no quotes and two dashes at most, and a flag may take the next word."""
    assert of(libtpu=one) != of(libtpu=other)


def test_libtpus_flags_that_only_dump_do_not_count():
    assert of(libtpu="--xla_a=1 --xla_jf_dump_to=b") == of(libtpu="--xla_a=1")
    assert of(libtpu="--xla_jf_dump_to=b") == of()


@pytest.mark.parametrize("name", ["flagfile", "fromenv", "tryfromenv"])
@pytest.mark.parametrize("text", ["--{}=a", "-{}=a", "--xla_a=1 --{} a", "--xla_a --{}=a,b", "--xla_a=1\n--{}=a"])
def test_libtpus_flags_from_elsewhere_are_refused(name, text):
    """libtpu reads files and variables once, which may change or name others."""
    with pytest.raises(UncacheableError, match="libtpu's flags"):
        refuse_unseen(text.format(name))


def test_libtpus_other_flags_are_not_refused():
    text = "--xla_flagfile=1 --xla_a_fromenv=2 --undefok=xla_b /tmp/flagfiles"
    refuse_unseen(text)
    assert of(libtpu=text) != of()


def test_the_content_of_a_file_in_libtpus_next_word_counts(tmp_path):
    file = tmp_path / "profile"
    contents = []
    for text in ("one", "two"):
        file.write_text(text)
        contents.append(of(libtpu=f"--xla_new {file}"))
    assert contents[0] != contents[1]


def test_flags_that_a_program_adds_by_jaxs_own_means_count():
    assert collect({}, (), extra="mine") != collect({}, ())
    assert collect({}, ("--my_flag=1",), prefixes=("--my_",)) != collect({}, ("--my_flag=1",))


def test_flags_may_stand_in_a_file(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_a=1\n--xla_b=2\n")
    assert of(str(file)) == of("--xla_a=1 --xla_b=2")
    file.write_text("--xla_a=2")
    assert of(str(file)) == of("--xla_a=2")
    with pytest.raises(UncacheableError):
        of(str(tmp_path / "missing"))


def test_the_content_of_a_file_that_xla_reads_counts(tmp_path):
    file = tmp_path / "autotune.txt"
    file.write_text("one")
    flag = f"--xla_gpu_load_autotune_results_from={file}"
    before = of(flag)
    assert of(flag) == before
    file.write_text("two")
    assert of(flag) != before
    file.unlink()
    with pytest.raises(UncacheableError):
        of(flag)


@pytest.mark.parametrize(
    "flag", ["--xla_new={}", "--xla_backend_extra_options=-a,-profile={},-b", "--xla_new=file://{}"]
)
@pytest.mark.parametrize("source", ["xla", "libtpu", "argv"])
def test_the_content_of_a_file_counts_whatever_flag_names_it(tmp_path, flag, source):
    file = tmp_path / "profile"
    text = flag.format(file)

    def now() -> bytes:
        arguments = (text,) if source == "argv" else ()
        return of(text * (source == "xla"), libtpu=text * (source == "libtpu"), argv=arguments)

    missing = now()
    file.write_text("one")
    one = now()
    file.write_text("two")
    assert len({missing, one, now()}) == 3


def test_a_file_that_was_read_long_ago_is_read_again_when_it_has_changed(tmp_path):
    file = tmp_path / "autotune.txt"
    contents = []
    for text in ("one", "two"):
        file.write_text(text)
        os.utime(file, (1e9, 1e9))
        contents.append(of(f"--xla_gpu_ptx_file={file}"))
    assert contents[0] != contents[1]


@pytest.mark.parametrize("flag", ["", "--xla_gpu_ptx_file="])
def test_a_pipe_is_left_to_xla(tmp_path, flag):
    """Only the first reader of a pipe gets its content, and that must be XLA."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open(pipe, "wb", buffering=0) as writing:
        writing.write(b"--xla_a=1")
        with pytest.raises(UncacheableError, match="cannot be read"):
            of(f"{flag}{pipe}")
    assert os.read(reading, 100) == b"--xla_a=1"
    os.close(reading)


@pytest.mark.parametrize("name", ["/dev/zero", "/", ".", "x" * 5000, "a\0b"])
@pytest.mark.parametrize("flag", ["", "--xla_gpu_ptx_file="])
def test_a_path_that_is_no_file_is_not_read(name, flag):
    with pytest.raises(UncacheableError, match="cannot be read"):
        of(flag + name)


def test_a_file_of_flags_may_hold_anything(tmp_path):
    file = tmp_path / "flags"
    file.write_bytes(b"--xla_a=\xff --xla_b='\0' \0")
    assert b"xla_a=" in of(str(file))
    file.write_bytes(b"--xla_gpu_ptx_file=a\0b")
    with pytest.raises(UncacheableError, match="cannot be read"):
        of(str(file))
