"""A script in the style of nanoGPT: one file, torchrun, gradient accumulation, a checkpoint.

torchrun --nproc-per-node 2 --max-restarts 3 examples/integrations/nanogpt_style.py out
"""

import os
import sys

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

out_file = os.path.join(sys.argv[1], "ckpt.pt")
backend = "pccl"  # 'nccl', 'gloo', etc.
max_iters, save_interval, batch_size, block_size, n_embd = 60, 10, 8, 32, 64
init_process_group(backend=backend)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gradient_accumulation_steps = 4 // world_size
torch.manual_seed(1337 + rank)
with open(__file__, "rb") as text:  # the data is this file
    data = torch.frombuffer(bytearray(text.read()), dtype=torch.uint8).long()


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(256, n_embd), torch.nn.Embedding(block_size, n_embd)
        self.block = torch.nn.TransformerEncoderLayer(n_embd, 4, 4 * n_embd, 0.0, batch_first=True)
        self.lm_head = torch.nn.Linear(n_embd, 256, bias=False)

    def forward(self, idx, targets):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(block_size)
        x = self.block(self.wte(idx) + self.wpe.weight, src_mask=mask, is_causal=True)
        return torch.nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


model, iter_num = GPT(), 0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
if os.path.exists(out_file):
    checkpoint = torch.load(out_file)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
ddp = DDP(model)
while iter_num < max_iters:
    iter_num += 1
    for micro_step in range(gradient_accumulation_steps):
        ix = torch.randint(len(data) - block_size - 1, (batch_size,))
        window = torch.stack([data[i : i + block_size + 1] for i in ix])
        ddp.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = ddp(window[:, :-1], window[:, 1:])
        (loss / gradient_accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank}, pid {os.getpid()}: iter {iter_num}, loss {loss.item():.4f}", flush=True)
    if rank == 0 and iter_num % save_interval == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "iter_num": iter_num}, out_file + ".new")
        os.replace(out_file + ".new", out_file)
destroy_process_group()
