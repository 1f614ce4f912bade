"""Builds the native CPU kernels beside the package, and puts the CUDA sources there; all else is in pyproject.toml.

They are a plain C library (no Python, no torch headers), so that one build serves every version of both, and a wheel is
tagged so. It links the C library alone: its threads are those of torch (kernels/cpu/parallel.hpp). Without a working
C++ compiler the installation goes on, and the PyTorch reference serves at run time.

Environment: CXX (or CC), CXXFLAGS and LDFLAGS, as usual.
"""

import logging
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# -ffp-contract=off: results must be those of the reference, bit for bit. The other two let square roots and
# conditions be vectorised, and change no value. Never -march: one binary serves every machine and chooses at run time.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# Of C++ the kernels use templates and headers alone, so that they need no libstdc++ or libgcc where they run.
ALONE = ["-static-libgcc", "-Wl,--as-needed"]
NAME = "commopt.ops.libcommopt_cpu"

log = logging.getLogger("commopt.setup")


class BuildLibrary(build_ext):
    """Compiler calls, as many at once as there are cores, that make one shared library."""

    def get_ext_filename(self, fullname: str) -> str:
        """The path without the tag of a Python version: the library is none of Python's business."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None to add: there is no module initialiser."""
        return list(ext.export_symbols)

    def build_extension(self, ext: Extension) -> None:
        """Compiles the library, or goes on without it."""
        target, objects = Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp)
        for folder in (target.parent, objects):
            folder.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CXX") or os.environ.get("CC") or "c++")
        extra = shlex.split(os.environ.get("CXXFLAGS", ""))
        at_the_end = [*ALONE, "-shared", "-o", str(target), *extra, *shlex.split(os.environ.get("LDFLAGS", ""))]
        made = {source: str(objects / f"{Path(source).stem}.o") for source in ext.sources}

        def call(arguments: list[str]) -> None:
            command = [*compiler, *FLAGS, *arguments]
            log.info("%s", shlex.join(command))
            subprocess.run(command, check=True)

        def compile_one(source: str) -> None:
            call(["-fno-exceptions", "-c", source, "-o", made[source], *extra])

        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # those that take long first
                list(pool.map(compile_one, sorted(made, key=lambda source: -os.path.getsize(source))))
            call([*made.values(), *at_the_end])
        except (OSError, subprocess.CalledProcessError) as problem:
            target.unlink(missing_ok=True)
            log.warning("building the native kernels failed: %s", problem)
            log.warning("commopt is installed without native CPU kernels: install a C++ compiler and reinstall")


class PlatformWheel(bdist_wheel):
    """A wheel for a platform, and for every Python on it."""

    def get_tag(self) -> tuple[str, str, str]:
        """The platform alone counts: the library knows no Python."""
        return "py3", "none", super().get_tag()[2]


class CopySources(build_py):
    """Modules, and the CUDA sources, compiled where they are used. An editable install reads the originals."""

    def run(self) -> None:
        """Copies both."""
        super().run()
        if not self.editable_mode:
            for source, target in self._sources().items():
                self.mkpath(os.path.dirname(target))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """What it writes."""
        return [*super().get_outputs(include_bytecode), *self._sources().values()]

    def _sources(self) -> dict[str, str]:
        folder = os.path.join(self.build_lib, "commopt", "ops", "cuda_sources")
        return {path: os.path.join(folder, os.path.basename(path)) for path in CUDA_SOURCES}


# setuptools wants paths relative to this file, and sorted ones give the same build everywhere.
HERE = Path(__file__).resolve().parent
SOURCES = sorted(str(path.relative_to(HERE)) for path in HERE.glob("kernels/cpu/*.cpp"))
HEADERS = sorted(
    str(path.relative_to(HERE)) for pattern in ("*.hpp", "*.inc") for path in HERE.glob(f"kernels/cpu/{pattern}")
)
CUDA_SOURCES = sorted(str(path.relative_to(HERE)) for path in HERE.glob("kernels/cuda/*.cu*"))

setup(
    ext_modules=[Extension(NAME, SOURCES, depends=HEADERS, optional=True)],
    cmdclass={"build_ext": BuildLibrary, "build_py": CopySources, "bdist_wheel": PlatformWheel},
)
