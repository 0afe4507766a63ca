#!/usr/bin/env bash
# Mutation run over hacrl/algorithms: changes one thing at a time and asks whether a test fails.
#
#   benchmarks/mutation/run.sh [WORK_DIRECTORY]
#
# The algorithms and their tests are copied into the work directory (a fresh temporary one by default) and changed
# there only; given an earlier one, mutants of unchanged functions keep their result. MUTATION_PYTHON names the
# interpreter (an absolute path; .venv's by default), JOBS the number of processes. The tool is installed if it is
# missing. Prints every mutant that no test noticed; docs/mutation.md explains those that remain.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=${1:-$(mktemp -d)}
python=${MUTATION_PYTHON:-$root/.venv/bin/python}
"$python" -c 'import mutmut' 2> /dev/null \
    || "$python" -m pip install --quiet --constraint "$root/constraints.txt" mutmut==3.8.1
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

mkdir -p "$work/hacrl" "$work/tests"
cp "$root/benchmarks/mutation/setup.cfg" "$work/"
: > "$work/hacrl/__init__.py"
for part in hacrl/algorithms tests/algorithms tests/golden; do
    rm -rf "${work:?}/$part"
    cp -r "$root/$part" "$work/$part"
done

cd "$work"
"$python" -m mutmut run --max-children "${JOBS:-2}"
"$python" -m mutmut results --all true > results.txt
echo "mutants: $(grep -c ': ' results.txt), by outcome:"
sed 's/.*: //' results.txt | sort | uniq -c
sed -n 's/^ *\(.*\): \(survived\|no tests\|suspicious\|timeout\|not checked\)$/\1/p' results.txt | while read -r mutant; do
    "$python" -m mutmut show "$mutant"
done
echo "work directory: $work"
