"""The published benchmarks through EleutherAI's lm-evaluation-harness; needs the extra `evals[lm-eval]`."""
