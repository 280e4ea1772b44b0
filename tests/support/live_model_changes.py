"""Changes of a live model or its config after it was built. Each raises Inapplicable if the
model has no such part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN

from tests.support.live_models import LiveModel

ALL_DROPPED = 1 - 1e-9
"""A dropout of so nearly 1 that nothing remains, and no random number matters."""
DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob"),
)
EPSILONS = ("eps", "variance_epsilon")


def dropouts(live: LiveModel) -> list[tuple[nn.Module, str]]:
    named = [(part, "p") for part in live.model.modules() if isinstance(part, nn.Dropout)]
    return named + [
        (part, name) for part in live.model.modules() for name in DROPOUTS if name in vars(part)
    ]


# ---- what is adopted: the parallel model trains what the live one does ---------------------------


def nothing(live: LiveModel) -> None:
    pass


def untied(live: LiveModel) -> None:
    live.require(live.causal and live.config.tie_word_embeddings)
    live.head.weight = nn.Parameter(live.head.weight.detach() + 0.1)


def tied(live: LiveModel) -> None:
    live.require(live.causal and not live.config.tie_word_embeddings)
    live.head.weight = live.embedding.weight


def padding_row_set(live: LiveModel) -> None:
    live.embedding.padding_idx = 2


def padding_row_unset(live: LiveModel) -> None:
    live.require(live.embedding.padding_idx is not None)
    live.embedding.padding_idx = None


def padding_token_changed(live: LiveModel) -> None:
    live.config.pad_token_id = live.random.choice([None, 1, 2, -1])


def dropout_disabled(live: LiveModel) -> None:
    live.build(
        live.random.randrange(99), **{name: 0.3 for name in DROPOUTS if name in vars(live.config)}
    )
    for part, name in dropouts(live):
        setattr(part, name, 0.0)


def dropout_enabled(live: LiveModel) -> None:
    kinds = {id(part) for part, _ in dropouts(live) if "embed" in type(part).__name__.lower()}
    for part, name in dropouts(live):
        if id(part) not in kinds:
            setattr(part, name, ALL_DROPPED)


def dropout_of_config_changed(live: LiveModel) -> None:
    for name in DROPOUTS:
        if name in vars(live.config):
            setattr(live.config, name, 0.4)


def vocabulary_resized(live: LiveModel) -> None:
    live.fields["vocab_size"] += live.random.choice([-5, 7])
    live.model.resize_token_embeddings(live.fields["vocab_size"], mean_resizing=False)


def last_layer_removed(live: LiveModel) -> None:
    del live.layers[-1]
    live.config.num_hidden_layers -= 1
    if hasattr(live.config, "layer_types"):
        live.config.layer_types = live.config.layer_types[:-1]


def attention_implementation_set(live: LiveModel) -> None:
    live.require(live.fields["model_type"] != "megatron-bert")
    live.model.set_attn_implementation("eager")


def router_loss_toggled(live: LiveModel) -> None:
    live.require(hasattr(live.config, "output_router_logits"))
    live.config.output_router_logits = not live.config.output_router_logits


def rotary_cast(live: LiveModel) -> None:
    _, rotary = live.any_module(lambda part: "inv_freq" in part._buffers)
    rotary.to(torch.bfloat16)


def checkpointing_enabled(live: LiveModel) -> None:
    live.model.activation_checkpointing_enable()
    live.model.enable_input_require_grads()


def copied(live: LiveModel) -> None:
    # Installs hooks of transformers' own.
    live.model(**live.batch(), output_hidden_states=live.causal)
    live.model = copy.deepcopy(live.model)


def frozen(live: LiveModel) -> None:
    name, _ = live.any_module(lambda part: any(name in vars(part) for name in EPSILONS))
    live.model.get_submodule(name).requires_grad_(False)


def subclassed(live: LiveModel) -> None:
    live.model.__class__ = type("Mine", (type(live.model),), {"describe": lambda self: "mine"})


ADOPTED: tuple[Callable[[LiveModel], None], ...] = (
    *(
        nothing,
        untied,
        tied,
        padding_row_set,
        padding_row_unset,
        padding_token_changed,
        dropout_disabled,
    ),
    *(dropout_enabled, dropout_of_config_changed, vocabulary_resized, last_layer_removed),
    *(
        attention_implementation_set,
        router_loss_toggled,
        rotary_cast,
        checkpointing_enabled,
        copied,
        frozen,
    ),
    subclassed,
)


# ---- what is refused; each returns words that the error has --------------------------------------


def encoder_untied(live: LiveModel) -> str:
    live.require(not live.causal)
    live.head.weight = nn.Parameter(live.head.weight.detach().clone())
    return "cls.predictions.decoder.weight"


def one_dropout_changed(live: LiveModel) -> str:
    several = [(part, name) for part, name in dropouts(live) if name == "p"]
    live.require(len(several) > 1)
    part, name = several[-1]
    setattr(part, name, 0.2)
    return "give all dropouts of a kind the same probability"


def epsilon_changed(live: LiveModel) -> str:
    name, norm = live.any_module(lambda part: any(name in vars(part) for name in EPSILONS))
    attribute = next(attribute for attribute in EPSILONS if attribute in vars(norm))
    setattr(norm, attribute, 0.1)
    return f"{name}: {attribute} is 0.1"


def epsilon_of_config_changed(live: LiveModel) -> str:
    name = next(name for name in vars(live.config) if name.endswith(("_eps", "_epsilon")))
    setattr(live.config, name, 0.1)
    return "its config gives 0.1"


def rotary_table_changed(live: LiveModel) -> str:
    name, rotary = live.any_module(lambda part: "inv_freq" in part._buffers)
    rotary.inv_freq *= 1.5
    return f"{name}.inv_freq"


def rotary_base_changed(live: LiveModel) -> str:
    _, rotary = live.any_module(lambda part: "inv_freq" in part._buffers)
    live.require(len(rotary.inv_freq) > 1)  # the first frequency is 1 with every base
    live.config.rope_parameters["rope_theta"] = 77.0
    return "rotary_emb.inv_freq"


def forward_hook(live: LiveModel) -> str:
    name, part = live.any_module(lambda part: True)
    part.register_forward_hook(lambda *_: None)
    return f"{name}: has a forward hook"


def forward_pre_hook(live: LiveModel) -> str:
    name, part = live.any_module(lambda part: True)
    part.register_forward_pre_hook(lambda *_: None)
    return f"{name}: has a forward pre-hook"


def backward_hook(live: LiveModel) -> str:
    name, part = live.any_module(lambda part: True)
    part.register_full_backward_hook(lambda *_: None)
    return f"{name}: has a backward hook"


def gradient_hook(live: LiveModel) -> str:
    name = live.random.choice([name for name, _ in live.model.named_parameters()])
    live.model.get_parameter(name).register_hook(lambda gradient: gradient * 2)
    return f"{name}: has a gradient hook"


def loss_replaced(live: LiveModel) -> str:
    live.model.loss_function = lambda *_, **__: torch.zeros((), requires_grad=True)
    return "its loss_function is replaced by <lambda>"


def forward_replaced(live: LiveModel) -> str:
    name, part = live.any_module(lambda part: not isinstance(part, nn.ModuleList))
    part.forward = lambda *_, **__: None
    return f"{name}: its forward is replaced"


def class_replaced(live: LiveModel) -> str:
    name, part = live.any_module(lambda part: isinstance(part, nn.Linear))
    part.__class__ = type(
        "Scaled", (type(part),), {"forward": lambda self, rows: 2 * nn.Linear.forward(self, rows)}
    )
    return f"{name}: is a Scaled"


def forward_overridden(live: LiveModel) -> str:
    live.model.__class__ = type("Mine", (type(live.model),), {"forward": lambda self, **_: None})
    return "Mine: its forward replaces that of"


def layer_removed(live: LiveModel) -> str:
    del live.layers[2]
    return ".2: is missing; its config gives a"


def middle_layer_removed(live: LiveModel) -> str:
    del live.layers[0]
    live.config.num_hidden_layers -= 1
    return ""


def layers_reordered(live: LiveModel) -> str:
    live.layers[0], live.layers[1] = live.layers[1], live.layers[0]
    live.require("layer_idx" in str([list(vars(part)) for part in live.layers.modules()]))
    return ""


def module_added(live: LiveModel) -> str:
    live.layers[1].adapter = nn.Linear(2, 2)
    return "1.adapter: a Linear that a"


def weight_added(live: LiveModel) -> str:
    live.layers[1].scale = nn.Parameter(torch.ones(2))
    return "1.scale: a "


def weight_widened(live: LiveModel) -> str:
    name, part = live.any_module(lambda part: isinstance(part, nn.Linear) and part is not live.head)
    part.weight = nn.Parameter(torch.cat([part.weight, part.weight]))
    return f"{name}.weight: shape"


def activation_replaced(live: LiveModel) -> str:
    own = {type(ACT2FN[name]) for name in ("gelu", "gelu_new", "silu")}
    name, _ = live.any_module(lambda part: type(part) in own)
    parent, _, child = name.rpartition(".")
    setattr(live.model.get_submodule(parent), child, nn.Tanh())
    return f"{name}: is a Tanh"


def scaling_changed(live: LiveModel) -> str:
    name, part = live.any_module(lambda part: "scaling" in vars(part))
    part.scaling = 0.7
    return f"{name}: scaling is 0.7"


def weights_shared(live: LiveModel) -> str:
    first, second = (next(iter(live.layers[number].named_parameters()))[0] for number in (0, 1))
    live.require(first == second)
    path, _, leaf = first.rpartition(".")
    setattr(live.layers[1].get_submodule(path), leaf, live.layers[0].get_parameter(first))
    return "is the same parameter as"


def memory_shared(live: LiveModel) -> str:
    live.require(live.causal and not live.config.tie_word_embeddings)
    live.head.weight.data = live.embedding.weight.data
    return "shares its memory with"


def dtypes_mixed(live: LiveModel) -> str:
    name, norm = live.any_module(lambda part: any(name in vars(part) for name in EPSILONS))
    norm.to(torch.float64)
    return f"{name}.weight: is torch.float64"


def mode_mixed(live: LiveModel) -> str:
    name, part = live.any_module(lambda part: not list(part.children()))
    part.eval()
    return f"{name}: is in evaluation mode"


def norm_of_embeddings_limited(live: LiveModel) -> str:
    live.embedding.max_norm = 0.5
    return "max_norm is 0.5"


def config_replaced(live: LiveModel) -> str:
    live.model.config = copy.deepcopy(live.config)
    live.model.config.initializer_range = 0.5
    return "its own config has initializer_range 0.02"


def router_coefficient_changed(live: LiveModel) -> str:
    live.require("router_aux_loss_coef" in vars(live.model))
    live.config.router_aux_loss_coef = 0.9
    return "router_aux_loss_coef is 0.5; its config gives 0.9"


REFUSED: tuple[Callable[[LiveModel], str], ...] = (
    *(
        encoder_untied,
        one_dropout_changed,
        epsilon_changed,
        epsilon_of_config_changed,
        rotary_table_changed,
    ),
    *(
        rotary_base_changed,
        forward_hook,
        forward_pre_hook,
        backward_hook,
        gradient_hook,
        loss_replaced,
    ),
    *(
        forward_replaced,
        class_replaced,
        forward_overridden,
        layer_removed,
        middle_layer_removed,
        layers_reordered,
    ),
    *(
        module_added,
        weight_added,
        weight_widened,
        activation_replaced,
        scaling_changed,
        weights_shared,
    ),
    *(memory_shared, dtypes_mixed, mode_mixed, norm_of_embeddings_limited, config_replaced),
    router_coefficient_changed,
)
