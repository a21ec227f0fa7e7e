import multiprocessing
import os
import socket
import threading
import time
import warnings

import pytest

from fly.backends.artefact import Artefact
from fly.errors import ArgumentError
from fly.runtime import cache as cache_module
from fly.runtime.cache import DiskCache, cache_key, get_or_build


def artefact(name="kernel", size=1000):
    return Artefact(name, "gfx950", bytes(size), "", (), (64, 1, 1))


ENTRY_BYTES = 64 + len(artefact().to_bytes())


def key(n):
    return cache_key({"n": str(n)})


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache", 1 << 20)


def entry(cache, k):
    return cache.directory / k[:2] / f"{k}.fly"


def age(cache, k, seconds):
    then = time.time() - seconds
    os.utime(entry(cache, k), (then, then))


def files(cache):
    return [path.name for path in cache.directory.glob("??/*")]


def test_what_was_put_is_got(cache):
    assert cache.get(key(1)) is None
    cache.put(key(1), artefact())
    assert cache.get(key(1)) == artefact()
    assert files(cache) == [f"{key(1)}.fly"]


def test_the_key_does_not_depend_on_order_and_tells_all_parts_apart():
    assert cache_key({"a": "x", "b": b"y"}) == cache_key({"b": b"y", "a": "x"})
    different = [{"a": "x"}, {"a": b"x"}, {"ax": ""}, {"a": "", "x": ""}, {"a": "xx"}, {"b": "x"}, {}]
    assert len({cache_key(parts) for parts in different}) == len(different)


@pytest.mark.parametrize("bad", ["", "abc", "../../etc/passwd", "A" * 64, "g" * 64])
def test_keys_are_digests(cache, bad):
    with pytest.raises(ArgumentError, match="SHA-256"):
        cache.get(bad)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:50] + b"?" + data[51:]]
)
def test_a_damaged_entry_is_dropped_and_built_again(cache, damage):
    cache.put(key(1), artefact())
    path = entry(cache, key(1))
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(key(1)) is None
    assert not path.exists()
    assert cache.get_or_build(key(1), lambda: artefact("again")).kernel == "again"
    assert cache.get(key(1)).kernel == "again"


def test_an_entry_of_another_key_is_built_again(cache):
    cache.put(key(1), artefact("one"))
    cache.put(key(2), artefact("two"))
    entry(cache, key(1)).write_bytes(entry(cache, key(2)).read_bytes())
    assert cache.get_or_build(key(1), lambda: artefact("one again")).kernel == "one again"
    assert [cache.get(key(n)).kernel for n in (1, 2)] == ["one again", "two"]


def test_an_entry_that_does_not_fit_is_replaced(cache):
    cache.put(key(1), artefact("other"))
    assert cache.get_or_build(key(1), artefact, lambda found: found.kernel == "kernel") == artefact()
    assert cache.get(key(1)) == artefact()


def pipe(path):
    os.mkfifo(path)


def link_to_a_valid_entry(path):
    target = path.with_suffix(".moved")
    path.rename(target)
    path.symlink_to(target)


def socket_file(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    "place", [pipe, os.mkdir, socket_file, lambda path: os.truncate(path, 1 << 40), link_to_a_valid_entry]
)
def test_what_is_no_regular_file_of_a_sensible_size_is_replaced_without_waiting(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    cache = DiskCache("cache", 1 << 20)
    cache.put(key(1), artefact())
    path = entry(cache, key(1))
    if place in (pipe, os.mkdir, socket_file):
        path.unlink()
    place(path)
    assert cache.get_or_build(key(1), lambda: artefact("again")).kernel == "again"
    assert path.is_file() and not path.is_symlink()
    assert cache.get(key(1)).kernel == "again"


def test_the_least_recently_used_go_first(tmp_path):
    size = ENTRY_BYTES
    cache = DiskCache(tmp_path, 3 * size)
    for n in range(3):
        cache.put(key(n), artefact())
        age(cache, key(n), 100 - n)
    assert cache.get(key(0)) is not None  # used: now the newest
    cache.put(key(3), artefact())
    assert [cache.get(key(n)) is not None for n in range(4)] == [True, False, True, True]


def test_the_bound_holds(tmp_path):
    size = ENTRY_BYTES
    cache = DiskCache(tmp_path, 5 * size)
    for n in range(20):
        cache.put(key(n), artefact())
    assert len(files(cache)) == 5


def test_temporary_files_of_dead_processes_are_removed(cache):
    cache.put(key(1), artefact())
    folder = entry(cache, key(1)).parent
    old, new = folder / "old.tmp", folder / "new.tmp"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    cache.put(key(2), artefact())
    assert not old.exists()
    assert new.exists()


def test_an_entry_evicted_between_listing_and_looking_is_no_error(cache, monkeypatch):
    cache.put(key(1), artefact())
    cache.max_bytes = 1
    unlink = cache_module.Path.unlink

    def twice(path, *args):
        unlink(path)
        return unlink(path, *args)  # as if another process had been first

    monkeypatch.setattr(cache_module.Path, "unlink", twice)
    cache.put(key(2), artefact())
    assert files(cache) == []


def test_a_hit_takes_no_lock(cache, monkeypatch):
    cache.put(key(1), artefact())
    monkeypatch.setattr(cache_module, "_lock", None)
    assert cache.get_or_build(key(1), None) == artefact()


def test_a_failed_build_leaves_nothing_and_the_next_builds(cache):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get_or_build(key(1), fail)
    assert files(cache) == []
    assert cache.get_or_build(key(1), artefact) == artefact()


def test_different_keys_build_inside_one_another(cache):
    def outer():
        cache.get_or_build(key(2), artefact)
        return artefact("outer")

    assert cache.get_or_build(key(1), outer).kernel == "outer"
    assert cache.get(key(2)) is not None


def _build_slowly(directory, log):
    def build():
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.2)
        return artefact()

    assert DiskCache(directory, 1 << 20).get_or_build(key(1), build) == artefact()


def test_one_of_many_processes_builds(tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = (tmp_path / "cache", tmp_path / "log")
    processes = [context.Process(target=_build_slowly, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"
    assert not list((tmp_path / "cache").glob("??/*.lock"))


def test_one_of_many_threads_builds(cache):
    built = []

    def build():
        built.append(1)
        time.sleep(0.05)
        return artefact()

    threads = [threading.Thread(target=cache.get_or_build, args=(key(1), build)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


def test_processes_that_put_and_evict_do_not_disturb_each_other(tmp_path):
    size = ENTRY_BYTES

    def work(seed):
        cache = DiskCache(tmp_path, 3 * size)
        for n in range(60):
            k = key((n * seed) % 7)
            assert cache.get_or_build(k, artefact) == artefact()

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert len(list(tmp_path.glob("??/*.fly"))) <= 3


def test_a_directory_that_cannot_be_written_is_named_once(tmp_path):
    (tmp_path / "file").touch()
    cache = DiskCache(tmp_path / "file" / "cache", 1 << 20)
    with pytest.warns(RuntimeWarning, match=r"file/cache cannot be written to .*FLY_CACHE_DIR"):
        assert cache.get_or_build(key(1), artefact) == artefact()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build(key(2), artefact) == artefact()


def test_the_environment_turns_it_off_and_places_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLY_CACHE", "0")
    assert get_or_build(key(1), artefact) == artefact()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("FLY_CACHE", "1")
    get_or_build(key(1), artefact)
    assert get_or_build(key(1), lambda: artefact("other")) == artefact()
    assert entry(DiskCache(tmp_path, 1), key(1)).exists()
