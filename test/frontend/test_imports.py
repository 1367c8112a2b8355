"""The language is light: no model library, no HTTP client, no thread until something runs."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_language_loads_nothing_heavy_and_starts_nothing() -> None:
    python(
        """
        import sys, threading
        before = threading.active_count()
        from trellis.frontend import function, gen, select, fork, join, user, set_default_backend
        heavy = {"torch", "numpy", "transformers", "httpx", "pydantic", "asyncio", "tqdm", "zmq", "fastapi",
                 "msgspec", "trellis.runtime", "trellis.radix", "trellis.fsm"} & set(sys.modules)
        assert not heavy, heavy
        assert threading.active_count() == before
        """
    )


def test_importing_the_package_loads_next_to_nothing() -> None:
    """So little that its time is that of starting Python; ``python -m benchmark.language`` measures it."""
    python(
        """
        import sys
        before = set(sys.modules)
        import trellis
        loaded = set(sys.modules) - before
        ours = {name for name in loaded if name.partition(".")[0] == "trellis"}
        assert ours <= {"trellis", "trellis.errors"}, ours
        heavy = {"torch", "numpy", "transformers", "httpx", "pydantic", "asyncio", "tqdm", "zmq", "fastapi", "msgspec",
                 "jinja2", "ssl", "typing_extensions", "concurrent.futures"} & loaded
        assert not heavy, heavy
        assert len(loaded) < 20, loaded
        """
    )


def test_a_program_on_the_mock_needs_no_http_client_either() -> None:
    python(
        """
        import sys
        from trellis.frontend import MockBackend, function, gen
        @function
        def program(s):
            s += "a" + gen("x")
        assert program.run(backend=MockBackend("b")).text() == "ab"
        assert not {"httpx", "torch", "numpy"} & set(sys.modules)
        """
    )


def test_engine_without_the_runtime_says_how_to_get_it() -> None:
    python(
        """
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("torch", "numpy", "msgspec", "zmq"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Missing())
        from trellis.errors import BackendError
        from trellis.frontend import Engine
        try:
            Engine()
        except BackendError as error:
            assert "pip install '.[runtime]' -c constraints.txt" in str(error), error
        else:
            raise SystemExit("no error")
        """
    )


def test_the_process_ends_while_a_program_hangs() -> None:
    python(
        """
        from trellis.frontend import MockAnswer, MockBackend, function, gen
        @function
        def program(s):
            s += "a" + gen("x")
        state = program.run(backend=MockBackend(MockAnswer(latency=float("inf"))), stream=True)
        print(next(state.text_iter()))
        """
    )


def test_a_forked_process_starts_a_loop_of_its_own() -> None:
    python(
        """
        import os
        from trellis.frontend import MockBackend, function, gen
        @function
        def program(s):
            s += "a" + gen("x")
        assert program.run(backend=MockBackend("b"))["x"] == "b"
        child = os.fork()
        if child == 0:
            ok = program.run(backend=MockBackend("c"))["x"] == "c"
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_every_public_name_can_be_imported() -> None:
    python(
        """
        import trellis.frontend as language
        for name in language.__all__:
            assert getattr(language, name) is not None
        try:
            language.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
        else:
            raise SystemExit("no error")
        """
    )
