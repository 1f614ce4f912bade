#!/usr/bin/env bash
# Make the files of a release, and try them: scripts/release.sh VERSION [FOLDER]
#
# Of what is committed: a source distribution and a wheel, in FOLDER (dist). The wheel is then installed in an empty
# environment, without a compiler and away from the repository, where two ranks swap an optimizer, probe the network and
# train a model. Uploads nothing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

[ $# -ge 1 ] || fail "which version? For example: scripts/release.sh 0.2.0"
version="$1"
out="$(mkdir -p "${2:-$ROOT/dist}" && cd "${2:-$ROOT/dist}" && pwd)"
cd "$ROOT"

[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed: git status"
for file in pyproject.toml commopt/__init__.py; do
    grep -qE "^(__)?version(__)? = \"$version\"\$" "$file" || fail "$file has another version than $version"
done
grep -qE "^## ${version//./\\.}( |\$)" CHANGELOG.md || fail "CHANGELOG.md has no section $version"

ensure_env release
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

echo "== build"
mkdir "$work/tree"
git archive HEAD | tar -x -C "$work/tree"
python -m build --outdir "$work/built" "$work/tree"
auditwheel show "$work"/built/*.whl
auditwheel repair --wheel-dir "$work/wheel" "$work"/built/*.whl
wheel="$(echo "$work"/wheel/*.whl)"
[[ "$(basename "$wheel")" == commopt-"$version"-py3-none-*manylinux* ]] || fail "$wheel is tagged for too little"

echo "== what is inside"
python - "$wheel" "$work"/built/*.tar.gz <<'EOF'
import sys, tarfile, zipfile
from pathlib import Path

wheel, sdist = zipfile.ZipFile(sys.argv[1]).namelist(), tarfile.open(sys.argv[2]).getnames()
inside = {name.partition("/")[2] for name in sdist}
kernels = [path.as_posix() for path in Path("kernels").rglob("*.*")]
missing = [name for name in [*kernels, "setup.py", "constraints.txt", "LICENSE"] if name not in inside]
library = "commopt/ops/libcommopt_cpu.so"
wanted = [library] + [f"commopt/ops/cuda_sources/{Path(name).name}" for name in kernels if "/cuda/" in name]
missing += [name for name in wanted if name not in wheel]
bundled = [name for name in wheel if ".so" in name and name != library]
sys.exit(f"missing: {missing}; bundled: {bundled}" if missing or bundled else 0)
EOF

echo "== an empty environment"
"$VENV/bin/python" -m venv "$work/empty"
"$work/empty/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$wheel[train]"

cd "$work"
alone() { # COMMAND...: with nothing on the PATH but the environment's own programs
    env -u PYTHONPATH -u CC -u CXX PATH="$work/empty/bin" OMP_NUM_THREADS=1 "$@"
}
two() { # ARGUMENTS...: of torchrun, on two ranks
    alone "$work/empty/bin/torchrun" --standalone --nproc-per-node=2 "$@"
}
alone python -c 'import commopt, sys; r = commopt.ops.report()["sign_compress"]["cpu"]; print(commopt.__file__, r); sys.exit("native" not in r)'

echo "== swap an optimizer"
sed -n '/^```python title="swap.py"$/,/^```$/p' "$work/tree/docs/index.md" | sed '1d;$d' >swap.py
two swap.py | tee swap.log
grep -q compressed swap.log
echo "== probe"
two -m commopt probe --params=1M --step-time=0.05 --max-mb=1 | tail -n 12
echo "== train"
two -m commopt train --model.layers=1 --model.heads=2 --model.width=16 --data.corpus="$(echo "$work"/empty/lib/python3*/site-packages/commopt)" \
    --data.vocab_size=300 --data.seq_len=16 --data.cache_dir=cache --optim.args='{freeze_step: 10, betas: [0.9, 0.9]}' \
    --optim.warmup_steps=2 --train.run_dir=run --train.steps=30 --train.batch_size=8 --train.eval_every=15 --train.checkpoint_every=15
[ -f run/checkpoints/step-00000030/manifest.json ]

cp "$wheel" "$work"/built/*.tar.gz "$out"
echo "== good: $out"
ls -l "$out"
