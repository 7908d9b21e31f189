"""Things made on the spot, so that a recipe needs no download: `model.path=make:NAME`.

MODELS, DATA: name -> `module:function`, read without importing torch. A model is a function that
returns the folder it lies in; data is a function from the split's name to rows.
"""

MODELS = {
    "addition": "rloo_cli.made.addition:model",
    "tiny": "rloo_cli.made.tiny:model",
    "tiny_reward": "rloo_cli.made.tiny:reward_model",
}
DATA = {
    "addition": "rloo_cli.made.addition:rows",
    "tiny": "rloo_cli.made.tiny:rows",
    "tiny_chat": "rloo_cli.made.tiny:chat_rows",
}
