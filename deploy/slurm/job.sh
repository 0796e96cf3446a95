#!/bin/sh
#SBATCH --job-name=train
#SBATCH --time=10
export XCACHE=1 XCACHE_LOG=info
srun "$HOME/venv/bin/python" train.py
