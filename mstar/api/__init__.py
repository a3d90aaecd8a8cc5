"""HTTP: OpenAI's routes, the adapter routes, metrics. Front process; never imports torch.

body (schemas, unsupported) -> prompt (text, prompts, messages) -> sampling (parameters, seeds)
  -> sequences of the conductor (fanout) -> text (choice: detokenizer, stops) -> answer (responses, logprobs)
"""
