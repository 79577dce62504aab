"""Sixteen chats of the embedded pair's domain, and how far its drafter walks on them."""

CHATS = (
    "What is the capital of Portugal?",
    "What languages are spoken in Kenya?",
    "What is the climate like in Japan?",
    "What natural resources does Chile have?",
    "What is 23 plus 58?",
    "How many centimeters are in 12 meters?",
    "Laura has 18 flowers and buys 14 more. How many flowers does Laura have now?",
    "Write a short story about a clever fox named Oscar.",
    "Tell me a bedtime story about Mia the kitten.",
    "How do I write a Python function that checks whether a string is a palindrome?",
    "Please write a function in Python that counts the words in a text.",
    "Select name, id from employees where salary is greater than 50.",
    "Extract the data as JSON.\n\nNora is a 31 year old nurse from Oslo. Nora likes the color blue.",
    "Reverse this list: coins, kettle, candles, rabbit, apples",
    "What does the word harbor mean?",
    "Who are you?",
)
MAX_TOKENS = 96

# Drafts walked a row-round on CHATS, greedy, whole blocks, by the drafter's fingerprint.
EXPECTED_WALK = {"6863f8aa4c45fd30c6d7f0b1b57b25d9": 4.84}  # the embedded pair
