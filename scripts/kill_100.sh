#!/bin/sh
# Training is killed (kill -9) at a hundred random moments and has to end with the weights of a run that
# nobody disturbed. The test suite does ten.
set -eu
cd "$(dirname "$0")/.."
FLASHDRAFT_KILLS=100 exec python -m pytest tests/test_training_resume.py -k killed_at_any_moment "$@"
