"""Routes that clients know from OpenAI and its like and that are not served here, with the reason."""

_REASONS = {
    "/v1/embeddings": "this server generates text with one target model and has no embedding model",
    "/v1/rerank": "this server has no ranking model",
    "/v1/score": "this server has no ranking model",
    "/v1/moderations": "this server has no moderation model",
    "/v1/audio": "this server reads and writes text, not sound",
    "/v1/realtime": "this server reads and writes text, not sound",
    "/v1/images": "this server reads and writes text, not images",
    "/v1/videos": "this server reads and writes text, not images",
    "/v1/files": "this server stores nothing; send prompts with the request",
    "/v1/uploads": "this server stores nothing; send prompts with the request",
    "/v1/batches": "this server has no batch endpoint; a batch file is answered by a job (see the README)",
    "/v1/vector_stores": "this server stores nothing",
    "/v1/containers": "this server runs no code of clients",
    "/v1/conversations": "this server stores no conversations; send the history as 'messages'",
    "/v1/assistants": "this server keeps no assistants; use /v1/chat/completions with 'tools'",
    "/v1/threads": "this server stores no conversations; send the history as 'messages'",
    "/v1/evals": "this server runs no evaluations",
    "/v1/fine_tuning": "this server does not train",
    "/v1/responses": "this server stores no responses",  # .../{id}
    "/v1/messages": "this server speaks OpenAI's /v1/chat/completions, not Anthropic's dialect",
    "/v1/completions/render": "use /tokenize to see a prompt's tokens",
    "/v1/chat/completions/render": "use /tokenize to see a conversation's tokens",
    "/v1/chat/completions": "this server stores no completions",  # .../{id}
    "/v1/load_lora_adapter": "this server has no adapters",
    "/v1/unload_lora_adapter": "this server has no adapters",
    "/tokenizer_info": "the tokenizer's files are not given out; /tokenize and /detokenize use it",
    "/pooling": "this server generates text and has no pooling model",
    "/classify": "this server generates text and has no classifier",
    "/api": "this server speaks OpenAI's dialect under /v1, not Ollama's",
}


def reason_of(path: str) -> str | None:
    """Return why a known route is not served; None for one that nobody knows."""
    while path.count("/") > 1 or path in _REASONS:
        if path in _REASONS:
            return _REASONS[path]
        path = path.rpartition("/")[0]
    return None
