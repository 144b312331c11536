import sys, tempfile, collections, time, json
from pathlib import Path
import torch
from torch.profiler import profile, ProfilerActivity
from bench import gpu_steps
from bench.gpu.families import ShapeInFormat
from bench.harness import checkpoints
from bench.harness.tables import pages_for
from worker_svc.config import WorkerConfig
from worker_svc.startup import startup
name, rows = sys.argv[1], [int(r) for r in sys.argv[2:]]
shape=ShapeInFormat.parse(name)
opts=gpu_steps.Options(shape=shape.shape,batches=tuple(rows),context=1024,steps=30,temperature=0.0,top_p=1.0,device='cuda',tensor_parallel_size=1,repeat=1,layers=0,all_reduce='auto',attention_backend='auto',gemm_algorithms='auto',dtype='bfloat16',kv_cache_dtype='auto',quantization=getattr(shape,'quantization','auto') or 'auto',model_impl='native',model=None)
cfg=WorkerConfig(device='cuda',dtype='bfloat16',load_format='dummy',max_num_seqs=max(rows),max_model_len=1024+200,quantization=opts.quantization)
with tempfile.TemporaryDirectory() as d:
    folder=checkpoints.describe(Path(d),shape.shape,0)
    model=startup.load(cfg,folder,'auto','')
    runner=startup.build_runner(cfg,model,pages_for(model,cfg,max(rows)))
    runner.warm_up()
    for r in rows:
        calm=gpu_steps.measure(runner,opts,r)
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            gpu_steps.measure(runner,opts,r)
        ev=[e for e in p.events() if e.device_type.name=='CUDA']
        ev.sort(key=lambda e:e.time_range.end)
        tot=collections.defaultdict(lambda:[0,0.0,0.0])
        n=50; last=ev[max(0,len(ev)//4-1)].time_range.end
        mid=len(ev)//4
        for e in ev[mid:]:
            k=e.name[:48]; t=tot[k]; t[0]+=1; t[1]+=e.time_range.elapsed_us(); t[2]+=min(e.time_range.end-last,1000); last=e.time_range.end
        last=0
        m=n*(len(ev)-mid)/len(ev)
        print(f'== {name} rows {r} step {calm.step_us:.0f} device {calm.device_us:.0f}')
        for k,(c,t,adv) in sorted(tot.items(),key=lambda x:-x[1][2])[:11]:
            print(f'  {c/m:6.1f} x adv {adv/c:6.2f} dur {t/c:6.2f} = {adv/m:7.1f} {k}')
        sys.stdout.flush()
