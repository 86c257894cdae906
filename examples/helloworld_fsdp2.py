"""The same layer under FSDP2, which is set to ignore the experts: each rank has its own.

    torchrun --nproc-per-node 2 examples/helloworld_fsdp2.py --num_local_experts 2 --top 2
    mpiexec -n 2 python examples/helloworld_fsdp2.py --model_dim 64 --hidden_size 64

Flags are named as in Tutel's examples.

next: examples/own_loop.py
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import tmoe
from tmoe.front import Parser
from tmoe.model.parallelize import apply_ep
from tmoe.parallel.launcher import join

parser = Parser(__doc__)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--num_tokens", type=int, default=512, help="tokens of each row of the batch")
parser.add_argument("--model_dim", type=int, default=2048)
parser.add_argument("--hidden_size", type=int, default=2048)
parser.add_argument("--num_local_experts", type=int, default=2, help="number of experts on each rank")
parser.add_argument("--dtype", choices=("float32", "float64", "float16", "bfloat16"), default="float32")
parser.add_argument("--top", type=int, default=2, help="number of experts of each token")
parser.add_argument("--l_aux_wt", type=float, default=0.0, help="weight of the load-balancing loss")
parser.add_argument("--num_steps", type=int, default=100)
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--eval", action="store_true", help="run only the forward pass")
parser.add_argument("--use_tensorcore", action="store_true", help="fp32 products in TF32")
args = parser.parse_args()
torch.backends.cuda.matmul.fp32_precision = "tf32" if args.use_tensorcore else "ieee"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        cfg = tmoe.MoEConfig(
            experts=args.num_local_experts * dist.get_world_size(),
            top_k=args.top,
            ffn_dim=args.hidden_size,
            balance_coeff=args.l_aux_wt,
            z_coeff=0.0,
        )
        self.moe = tmoe.MoE(args.model_dim, cfg)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return F.log_softmax(self.moe(x_BSD).sum(2), dim=1)


join()  # the world that torchrun, mpiexec or srun announces; without a launcher, only this process
rank, world = dist.get_rank(), dist.get_world_size()
mesh = tmoe.parallel.build_mesh(ep=world)
device, dtype = mesh.world.device_type, getattr(torch, args.dtype)
torch.manual_seed(1)  # every rank builds the same model and keeps its part
model = Model().to(device, dtype)
apply_ep(model.moe, mesh, "auto")
experts = set(model.moe.experts.parameters())
fully_shard(model, mesh=mesh.world, ignored_params=experts)  # in place
optimizer = torch.optim.SGD(tmoe.parallel.tag_experts(model), lr=args.lr)  # experts: a parameter group

torch.manual_seed(0)
x_BSD = torch.randn(args.batch_size, args.num_tokens, args.model_dim).to(device, dtype)
y_B = torch.zeros(args.batch_size, dtype=torch.int64, device=device)
times = []
for step in range(args.num_steps):
    start = time.perf_counter()
    with torch.set_grad_enabled(not args.eval):
        loss = F.nll_loss(model(x_BSD), y_B)
    if not args.eval:
        optimizer.zero_grad()
        whole = loss + world * tmoe.balancing_loss(model) if args.l_aux_wt else loss
        whole.backward()
        for p in experts:
            assert p.grad is not None
            p.grad.div_(world)  # FSDP2 averages over ranks; an expert's gradient is the sum over all tokens
        optimizer.step()
    value = loss.item()  # waits for the device
    times.append(time.perf_counter() - start)
    if rank == 0:
        print(f"STEP-{step}: loss = {value:.5f}, step_time = {times[-1]:.6f} sec", flush=True)
if rank == 0 and times:
    last = times[-10:]
    print(f"[Summary] Average synchronized step_time = {sum(last) / len(last):.6f} sec")
dist.destroy_process_group()
