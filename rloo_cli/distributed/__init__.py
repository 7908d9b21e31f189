"""Several processes as one trainer.

Every rank knows a step's whole batch (ids, scores, advantages: small numbers); it samples, scores
and forwards its own share. So what is computed over a batch is the same on every rank, without a
word about ranks where it is computed: `world` has the few calls in which they meet. How weights,
gradients and optimizer are spread is an `engine`; the loop does not know which one it has.
"""
