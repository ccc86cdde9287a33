"""What happens in the stories: problems, how they went on and how they ended.

Each part holds alternatives between bars. {n} is the name, {s} {o} {p} its pronouns ({S}
at the start of a sentence), {h} the helper, {t} the thing, {a} its adjective, {at} the
adjective with its article, {x} a place and {i} the place with its preposition.
"""

# ruff: noqa: E501  (a table reads best with an entry on a line)

from __future__ import annotations

from typing import Final

PLOTS: Final = (
    (
        "{n} lost {p} {a} {t}.|{n} could not find {p} {a} {t}.|the {a} {t} of {n} was gone.",
        "{S} looked for it everywhere, but {s} could not find it.|{S} asked everyone, but nobody "
        "had seen it.|{S} looked under the bed and behind the door, but it was not there.",
        "{h} had seen the {t} near {x}. They went there together and found it.|At last {h} found "
        "it {i}.|Then {h} remembered that it was {i}, and there it was.",
    ),
    (
        "{n} found {at} {t} near {x}.|{n} saw {at} {t} {i}.|there was {at} {t} in front of the door.",
        "{S} did not know whose {t} it was, so {s} asked everyone.|{S} took it home and thought "
        "about it all night.|It was so beautiful that {n} wanted to keep it.",
        "It belonged to {h}. {h} was very glad and thanked {n}.|In the end {n} gave it back to {h}, "
        "who had lost it.|{h} had left it there as a present for {n}.",
    ),
    (
        "{n} wanted to build {at} {t}.|{n} had a plan: {s} wanted to make {at} {t}.",
        "The work was hard, and {s} made many mistakes.|{S} worked all day, but something was always "
        "wrong.|First {s} needed wood, then nails, and then a lot of time.",
        "Then {h} came to help. In the end the {t} was ready, and both were proud of it.|{h} gave "
        "{o} some good advice, and soon the {t} was ready.|After three days it was ready, and {h} "
        "said that it was wonderful.",
    ),
    (
        "{n} heard a strange sound {i}.|there was a strange noise {i}.|{n} woke up because of a "
        "loud sound.",
        "{S} was afraid, but {s} wanted to know what it was.|{S} took a lamp and went to look.|"
        "Nobody else had heard it, so {n} went alone.",
        "It was only {h}, who was looking for {at} {t}. They laughed about it.|{h} had dropped "
        "{at} {t}, and that was all.|It was the wind that played with {at} {t}.",
    ),
    (
        "{n} got lost on the way to {x}.|{n} went for a walk and did not know the way back.",
        "It became dark, and {s} began to cry.|All the trees looked the same.|{S} called for help, "
        "but nobody answered.",
        "{h} heard {o} and showed {o} the way home. {n} was safe again.|Then {s} saw a light. It was "
        "{h} with {at} {t}.|{h} came by and took {o} home.",
    ),
    (
        "{n} broke the {a} {t} of {h}.|{n} dropped the {a} {t} that belonged to {h}.",
        "{S} was sorry and told the truth at once.|First {s} wanted to hide it, but then {s} told "
        "{h} about it.",
        "{h} was not angry. They repaired the {t} together.|{h} thanked {o} because {s} had told the "
        "truth.|{n} made a new one, and {h} liked it even more.",
    ),
    (
        "{n} wanted to give {h} a present.|{h} had a birthday, and {n} had no present.",
        "{S} had no money, so {s} made {at} {t} with {p} own hands.|{S} thought for a long time and "
        "then bought {at} {t}.",
        "{h} said it was the best present in the world.|{h} was so happy that everyone laughed.|"
        "{h} put it on the table and looked at it every day.",
    ),
    (
        "{n} could not sleep.|{n} lay in bed and was not tired at all.",
        "{S} got up and looked out of the window. There was a light {i}.|{S} counted to one hundred, "
        "but it did not help.",
        "{h} was there with {at} {t}. They talked for a while, and then {n} fell asleep.|{h} told "
        "{o} a long story, and {n} fell asleep.",
    ),
    (
        "there was a race {i}, and {n} wanted to win.|everyone talked about the big race, and {n} "
        "wanted to run too.",
        "{S} trained every day with {h}.|{S} was not fast, but {s} did not give up.",
        "{n} did not win, but {s} was happy because {h} was proud of {o}.|{n} won {at} {t} and gave "
        "it to {h}.|{h} fell, and {n} stopped to help. That was better than winning.",
    ),
    (
        "{n} met {h} {i} for the first time.|{h} came to live in the house next to {n}.",
        "They did not know what to say, so {n} showed {h} {p} {a} {t}.|Both were shy and looked at "
        "the ground.",
        "Soon they were good friends, and they met every day.|Then {h} said hello, and they played "
        "until the evening.",
    ),
    (
        "a storm came, and the wind took the {a} {t} of {n}.|the wind was so strong that the {a} {t} "
        "flew away.",
        "{S} ran after it, but the wind was faster.|{n} could only watch it go.",
        "{h} caught the {t} {i} and brought it back.|The next morning it was {i}, and nothing was "
        "broken.",
    ),
    (
        "{n} wanted to learn something new.|{n} asked {h} to teach {o} something.",
        "{h} showed {o} how to use {at} {t}. At first it was difficult.|{h} had {at} {t} and knew "
        "everything about it.",
        "After a week {s} could do it well, and {s} said thank you.|{n} tried again and again, and "
        "in the end it worked.",
    ),
    (
        "{n} and {h} had only one {t}.|{n} and {h} found one {t}, and both wanted it.",
        "Both wanted to have it, and they began to shout.|They did not talk to each other for a "
        "whole day.",
        "Then they had a better idea: they shared it. That was much more fun.|In the end {n} said "
        "sorry, and {h} said sorry too.",
    ),
    (
        "{n} saw an old {t} {i}.|somebody had left an old {t} {i}.",
        "Nobody used it any more, and it was full of dust.|It was broken, and people walked past it.",
        "{n} cleaned it with {h}, and it looked new again.|{h} helped to repair it, and now everyone "
        "wants to have it.",
    ),
    (
        "{n} had to carry {at} {t} to {x}.|{h} asked {n} to bring {at} {t} to {x}.",
        "It was too heavy for {o}, and {s} had to stop many times.|The way was long, and it began to "
        "rain.",
        "{h} took the other side, and together it was easy.|When {s} came there, {h} gave {o} some "
        "hot tea.",
    ),
    (
        "{n} planted a seed near {x}.|{n} put a small seed into the ground near {x}.",
        "{S} gave it water every day, but nothing happened.|{S} waited and waited.",
        "{h} told {o} to wait. After some weeks there was a beautiful flower.|Then one morning there "
        "was a green leaf, and {n} called {h} to see it.",
    ),
    (
        "{n} had a secret.|there was something that {n} told nobody.",
        "{S} had hidden {at} {t} {i}. Only {h} knew about it.|Every evening {s} went to {x} and came "
        "back late.",
        "{h} never told anyone, and that is how {n} knew that {h} was a true friend.|It was a "
        "surprise for {h}, who was very happy about it.",
    ),
    (
        "{n} wanted to see the sea.|{n} had never seen the sea.",
        "The way was long, so {h} came too and took {at} {t} along.|{S} walked for two days and "
        "slept under the trees.",
        "In the evening they stood at the water, and {n} was very happy.|The water was blue and "
        "cold, and {n} laughed and jumped in.",
    ),
    (
        "{n} was very hungry.|there was nothing to eat in the house.",
        "{S} looked into every pot, but all of them were empty.|{S} had only one small apple.",
        "{h} came with a warm soup, and they ate together.|{h} gave {o} half of the bread. It tasted "
        "better than ever.",
    ),
    (
        "{h} was ill and had to stay in bed.|{n} heard that {h} was ill.",
        "{n} cooked a soup and brought {at} {t}.|{n} sat next to the bed and told one story after "
        "the other.",
        "The next day {h} felt much better.|{h} smiled for the first time in days.",
    ),
    (
        "{n} was afraid of the dark.|{n} did not like the night.",
        "Every shadow looked like a monster.|{S} always left a small lamp on.",
        "{h} gave {o} {at} {t}, and since then {n} has not been afraid.|{h} showed {o} the stars, "
        "and {n} saw how beautiful the night was.",
    ),
    (
        "{n} told a lie about the {a} {t}.|{n} said that {h} had taken the {t}.",
        "Soon nobody wanted to talk to {o}.|{S} felt bad about it and could not eat.",
        "{n} said sorry to {h}, and everything was good again.|At last {s} told the truth, and {h} "
        "was not angry any more.",
    ),
    (
        "snow fell, and everything was white.|it snowed for the first time that year.",
        "{n} ran out to make a snowman with {at} {t} on its head.|{n} and {h} built a house of snow.",
        "They played until their hands were cold.|{h} brought hot milk, and they sat at the fire.",
    ),
    (
        "{n} got a letter.|a letter for {n} came with the morning train.",
        "It was from {h}, who was far away.|There was no name on it, only a picture of {at} {t}.",
        "{n} read it three times and wrote back at once.|It said that {h} would come soon, and {n} "
        "danced in the kitchen.",
    ),
)
