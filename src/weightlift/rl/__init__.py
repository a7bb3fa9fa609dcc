"""Reinforcement learning with the sync in the middle: GRPO, a verifiable task, a rollout process, the synchronous loop.

Owns: `weightlift train` apart from its command line. Must not know: how bytes travel; it uses `weightlift.Publisher`
and `Subscriber` as any other trainer would. Read loop.py first; it names the other files in the order in which they
work.
"""
