#!/usr/bin/env bash
# megatron-core 0.16.1: every router of experts fails where Transformer Engine is not installed.
#
# Transformer Engine is optional, and local layers (`get_gpt_layer_local_spec`) do without it. The router's product compares
# te_general_gemm with None, but the name exists only if the import of Transformer Engine succeeds. `moe_router_dtype` "fp64",
# which does not use it, fails alike, since the comparison comes first.
#
# Seen: NameError for fp32 and fp64; with the name set to None the product is torch's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 packaging==26.4
"$folder/env/bin/pip" install -q --no-deps megatron-core==0.16.1
cd "$folder"
export HOME="$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
import torch
from megatron.core.transformer.moe import moe_utils

tokens, weight = torch.randn(4, 8), torch.randn(3, 8)
for dtype in (torch.float32, torch.float64):
    try:
        moe_utils.router_gating_linear(tokens, weight, None, dtype)
    except NameError as error:
        print(f"{dtype}: NameError: {error}")
        assert "te_general_gemm" in str(error)
    else:
        raise AssertionError(f"{dtype}: the router computed")
moe_utils.te_general_gemm = None
found = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
print("with None: computed")
torch.testing.assert_close(found, tokens @ weight.T)
PY
