"""The README's example: a plan for 64 GPUs; a small GPT-2, proven, trained on two CPU ranks, and asked to write.

python examples/quickstart.py
"""

import meshwright

plan = meshwright.plan(sizes="layers=32,width=4096,heads=32,vocab=128256", cluster="64xh100", batch=256, sequence=8192)
print(f"{plan.layout}: {plan.step_s:.1f} s a step, {plan.reason}")

model = meshwright.ModelConfig(name="gpt2", layers=2, width=64, heads=2)
assert meshwright.verify(model=model, layout="shard=2,zero=3", steps=1).passed

data = meshwright.DataConfig(limit_bytes=400_000, vocab_size=512, sequence=64)
loop = meshwright.TrainConfig(steps=40, batch=16)
config = meshwright.RunConfig(model=model, layout="shard=2,zero=3", devices=2, data=data, train=loop)
result = meshwright.train(config)
print(f"validation loss {result.validation_loss:.3f} after {result.step} steps: {result.run}")
print(meshwright.generate(result.run, "import ", max_tokens=20).text)
