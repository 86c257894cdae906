"""tmoe's layers in your own model and training loop.

    torchrun --nproc-per-node 2 examples/own_loop.py --ep 2 --save DIR

next: tmoe/moe/layer.py, tmoe/model/parallelize.py
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tmoe
from tmoe.front import Parser

VOCAB = 64
SEQ = 16
ROWS = 8  # sequences of a step, on all ranks together
MICROS = 2  # micro-batches into which each rank divides its sequences


class Model(nn.Module):
    """Logits of the next token, [T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.head = nn.Linear(32, VOCAB)
        self.moe = tmoe.MoE(32, tmoe.MoEConfig(experts=8, top_k=2, ffn_dim=64, balance_coeff=0.01))

    def forward(self, x_BS: Tensor) -> Tensor:
        h_BSD = self.embedding(x_BS)
        return self.head((h_BSD + self.moe(h_BSD)).flatten(0, 1))


parser = Parser(__doc__)
parser.add_argument("--ep", type=int, default=1, help="number of ranks that share the experts")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--save", help="folder for a checkpoint after the last step")
parser.add_argument("--load", help="folder of a checkpoint to continue from, saved by any number of ranks")
args = parser.parse_args()

mesh = tmoe.parallel.build_mesh(ep=args.ep)  # joins the world that torchrun, mpiexec or srun announces
rank, world = dist.get_rank(), dist.get_world_size()
device = mesh.world.device_type
torch.manual_seed(0)  # every rank builds the same model; parallelize keeps this rank's part
model = tmoe.parallel.parallelize(Model().to(device), mesh)
model.compile()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_of(step: int) -> dict:
    """The content of a checkpoint after `step` steps."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"step": step, "model": model_state, "optimizer": optimizer_state}


state = state_of(0)
if args.load:
    dcp.load(state, checkpoint_id=args.load)  # in place
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

for step in range(state["step"], args.steps):
    x_RS = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(step))
    y_RS = (5 * x_RS + 3) % VOCAB  # the function to learn; a target of -100 would be ignored
    micros = [m.to(device) for m in torch.stack([x_RS, y_RS])[:, rank::world].chunk(MICROS, 1)]

    # Counts for the whole step, over all ranks and micro-batches: losses are sums divided by these counts.
    counts_M3 = [[(y != -100).sum().item(), x.numel(), len(x)] for x, y in micros]
    counts_3 = torch.tensor(counts_M3, dtype=torch.float64, device=device).sum(0)
    dist.all_reduce(counts_3)
    targets, tokens, sequences = counts_3

    loss = torch.zeros((), device=device)
    for i, (x_BS, y_BS) in enumerate(micros):
        model.set_requires_gradient_sync(i + 1 == MICROS)
        part = F.cross_entropy(model(x_BS), y_BS.flatten(), reduction="sum") / targets
        part = part + tmoe.balancing_loss(model, tokens, sequences)
        part.backward()
        loss += part.detach()
    norm = tmoe.parallel.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)  # a sum, as for gradients: every part was divided by counts of the whole step
    print(f"rank {rank} step {step} loss {loss.item():.6f} norm {norm.item():.6f}", flush=True)

if args.save:
    dcp.save(state_of(args.steps), checkpoint_id=args.save)
dist.destroy_process_group()
