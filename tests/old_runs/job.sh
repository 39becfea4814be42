#!/bin/bash
# mgpu-pipe submit --dry-run launch=slurm strategy=ddp model=llama_tiny model.config.vocab_size=384 model.config.hidden_size=16 model.config.intermediate_size=32 model.config.num_hidden_layers=2 model.config.num_attention_heads=2 model.config.num_key_value_heads=1 data=synthetic data.seq_len=32 data.synthetic.num_documents=60 trainer.num_nodes=2 trainer.devices=2 run.dir=/gone/run run.dir=/gone/run
#SBATCH --job-name=run
#SBATCH --output=/gone/run/logs/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=USR1@120
#SBATCH --comment=/gone/run
#SBATCH --requeue

run=/gone/run
srun --kill-on-bad-exit=1 python -P /gone/mgpu_pipe/import_path.py mgpu_pipe.launch.slurm_job "$run"
code=$?
# 75: stopped after saving, or worth another try; above 128: ended by a signal
if [ $code -eq 75 ] || [ $code -gt 128 ]; then
    trap '' TERM  # the shell outlives its job for a moment
    if ! scontrol requeue "$SLURM_JOB_ID"; then
        echo "error: SLURM does not requeue this job; go on with: sbatch $run/job.sh" >&2
    elif [ -s "$run/bad_nodes.txt" ]; then  # nodes that failed the check before the start
        nodes=$(cut -d' ' -f1 "$run/bad_nodes.txt" | paste -sd,)
        scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$nodes"
    fi
fi
exit $code
