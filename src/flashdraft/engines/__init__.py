"""Our draft in other engines, and theirs here: layouts, GGUF, and the assistant of transformers' own generate."""
