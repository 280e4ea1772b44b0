"""Quick TP checks, no hypothesis."""
import pytest, torch
from tests.model.architectures.test_decoders import same_as_native, trained, partial_norms, partial_mlps, attention_layers, biases_of_keys
from tests.model.architectures.test_generate import generated
BASE=dict(vocab_size=61,hidden_size=24,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,head_dim=8,intermediate_size=20,num_experts=5,num_experts_per_tok=2,moe_intermediate_size=12,shared_expert_intermediate_size=16,linear_key_head_dim=3,linear_value_head_dim=5,linear_num_key_heads=4,linear_num_value_heads=8,max_position_embeddings=64,bos_token_id=0,eos_token_id=0,pad_token_id=None,rms_norm_eps=0.02,layer_types=["linear_attention","full_attention","linear_attention"],output_router_logits=True,router_aux_loss_coef=0.3)
def fields(m):
    f={"model_type":m,**BASE}
    if m=="olmo_hybrid": f.pop("head_dim")
    if m in ("qwen3_5_text","olmo_hybrid"):
        for k in list(f):
            if "expert" in k or "moe" in k or "router" in k: f.pop(k)
    if m=="qwen3_5_moe_text": f.pop("intermediate_size")
    return f
TYPES=["qwen3_next","qwen3_5_text","qwen3_5_moe_text","olmo_hybrid"]
@pytest.mark.parametrize("world",[2,4])
@pytest.mark.parametrize("m",TYPES)
def test_same(ranks,world,m):
    f=fields(m)
    counts=ranks(world).run(same_as_native,world,f,3,"sdpa")
    assert counts==counts[:1]*world
    print(counts[0])
    replicated=bool(f["num_key_value_heads"]%world)
    for s in (False,True):
        assert counts[0][f"hooks, SP {s}"]==attention_layers(f)*2*replicated+partial_norms(f,world,sequence=s)+partial_mlps(f,sequence=s)
@pytest.mark.parametrize("t,s,z",[(2,True,3),(4,False,1),(4,True,3),(2,False,2),(1,False,0)])
@pytest.mark.parametrize("m",TYPES)
def test_zero(ranks,m,t,s,z):
    found=ranks(4).run(trained,fields(m),5,t,s,z)
    assert found==found[:1]*4
    assert found[0][1]<found[0][0]
@pytest.mark.parametrize("m",TYPES)
def test_generate(ranks,m):
    f=fields(m)|({"output_router_logits":False} if "moe" in m or "next" in m else {})
    ways=[{"do_sample":False},{"do_sample":True,"top_k":4,"min_new_tokens":6},{"do_sample":False,"cache_implementation":"static"},{"do_sample":False,"cache_implementation":"static","prefill_chunk_size":2},{"do_sample":False,"num_beams":2}]
    for pairs in ranks(2).run(generated,2,f,3,[[1,2,3,4,5],[7,8,9,3,2]],ways):
        for e,g in pairs: assert e==g
